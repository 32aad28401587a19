"""The pooled head: normalise each anchor, average, classify."""

import torch

from fst import parameter_count
from fst.vision import PooledHead


def test_the_pooled_head_is_what_the_paper_says():
    head = PooledHead(6, 4).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter))
    features = torch.randn(2, 5, 6, dtype=torch.float64)
    mean, variance = features.mean(-1, keepdim=True), features.var(-1, keepdim=True, correction=0)
    normed = (features - mean) / torch.sqrt(variance + 1e-5) * head.norm.weight + head.norm.bias
    expected = normed.sum(dim=1) / 5 @ head.output.weight.T + head.output.bias
    torch.testing.assert_close(head(features), expected, rtol=0, atol=1e-12)


def test_the_order_of_anchors_does_not_matter():
    head = PooledHead(6, 4).double()
    features = torch.randn(2, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(head(features[:, torch.randperm(5)]), head(features))


def test_the_count_is_the_papers():
    assert parameter_count(PooledHead(200, 1000)) == 201_400
