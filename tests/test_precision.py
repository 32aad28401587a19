"""Full precision, wherever it is asked for, and put back."""

import pytest
import torch

from fst.precision import full_precision
from precision_examples import lower_precision


def test_precision_is_put_back_after_a_failure():
    with lower_precision():
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
        with pytest.raises(ZeroDivisionError), full_precision():
            raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
