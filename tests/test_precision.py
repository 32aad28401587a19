"""Full precision, wherever it is asked for, and put back."""

import pytest
import torch

from fst.precision import full_precision
from precision_examples import lower_precision
from small import small_config, small_model, some_observations, some_queries


def test_precision_is_put_back_after_a_failure():
    with lower_precision():
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
        with pytest.raises(ZeroDivisionError), full_precision():
            raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_answers(dtype):
    model = small_model(small_config(condition_channels=1)).float()
    observations, queries = some_observations(model).to(torch.float32), some_queries(model).float()
    with torch.no_grad():
        expected = model(observations)(queries)
        found = model.to(dtype)(observations.to(dtype))(queries)
    assert found.dtype == dtype
    assert (found.float() - expected).norm() < 0.05 * expected.norm()
