import torch

from tap.model.codebook import Codebook
from tap.settings import CodebookParams

PARAMS = CodebookParams(size=3, dim=2, decay=0.5, commitment_weight=1.0, dead_usage=0.0)


def make_codebook(vectors: list[list[float]], **changes: float) -> Codebook:
    codebook = Codebook(PARAMS.model_copy(update=changes))
    codebook.vectors_KD.copy_(torch.tensor(vectors))
    codebook.sums_KD.copy_(codebook.vectors_KD)
    codebook.counts_K.fill_(1.0)
    return codebook


def test_codes_are_the_nearest_by_brute_force() -> None:
    torch.manual_seed(0)
    codebook = Codebook(CodebookParams(size=20, dim=5, decay=0.9, commitment_weight=1.0, dead_usage=0.0))
    codebook.vectors_KD.normal_()
    vectors = torch.randn(4, 7, 5)
    expected = ((vectors[..., None, :] - codebook.vectors_KD) ** 2).sum(-1).argmin(-1)
    torch.testing.assert_close(codebook.assign(vectors), expected)


def test_quantised_vectors_are_those_of_the_codes_and_the_gradient_passes_straight_through() -> None:
    codebook = make_codebook([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]]).eval()
    vectors = torch.tensor([[1.0, 1.0], [9.0, 2.0]], requires_grad=True)
    quantized, codes, commitment = codebook(vectors)
    assert codes.tolist() == [0, 1]
    torch.testing.assert_close(quantized.detach(), codebook.vectors_KD[codes])
    torch.testing.assert_close(commitment.detach(), torch.tensor([(1 + 1) / 2, (1 + 4) / 2]))
    (quantized * torch.tensor([[2.0, 3.0], [4.0, 5.0]])).sum().backward()
    torch.testing.assert_close(vectors.grad, torch.tensor([[2.0, 3.0], [4.0, 5.0]]))


def test_one_update_by_hand() -> None:
    codebook = make_codebook([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]]).train()
    codebook(torch.tensor([[2.0, 0.0], [4.0, 0.0], [9.0, 1.0]]))  # codes 0, 0, 1
    # counts 0.5 * 1 + 0.5 * (2, 1, 0), sums 0.5 * vectors + 0.5 * (6, 0), (9, 1), (0, 0)
    torch.testing.assert_close(codebook.counts_K, torch.tensor([1.5, 1.0, 0.5]))
    expected = torch.tensor([[3.0 / 1.5, 0.0], [9.5, 0.5], [0.0, 5.0 / 0.5]])
    torch.testing.assert_close(codebook.vectors_KD, expected, rtol=1e-3, atol=1e-3)


def test_evaluation_changes_nothing() -> None:
    codebook = make_codebook([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]]).eval()
    before = {name: value.clone() for name, value in codebook.state_dict().items()}
    codebook(torch.randn(10, 2))
    for name, value in codebook.state_dict().items():
        torch.testing.assert_close(value, before[name])


def test_dead_codes_are_replaced_by_encoder_outputs() -> None:
    torch.manual_seed(0)
    codebook = make_codebook([[0.0, 0.0], [10.0, 0.0], [1e6, 1e6]], dead_usage=0.6).train()
    batch = torch.tensor([[1.0, 1.0], [9.0, 1.0]])
    codebook(batch)  # the third code's count falls to 0.5
    assert any(torch.equal(codebook.vectors_KD[2], row) for row in batch)
    assert codebook.counts_K[2] == 1.0


def test_refit_codes_are_the_means_of_their_vectors_over_all_batches() -> None:
    """By hand: two vectors in one batch and one in the next are nearest to the first code, none to the third."""
    codebook = make_codebook([[0.0, 0.0], [10.0, 0.0], [0.0, 50.0]])
    counts = codebook.counts_K.clone()
    codebook.refit([torch.tensor([[[1.0, 0.0], [2.0, 3.0]]]), torch.tensor([[[3.0, 0.0], [9.0, 1.0]]])])
    torch.testing.assert_close(codebook.vectors_KD, torch.tensor([[2.0, 1.0], [9.0, 1.0], [0.0, 50.0]]))
    torch.testing.assert_close(codebook.counts_K, counts)


def test_the_first_batch_initialises_all_codes() -> None:
    torch.manual_seed(0)
    codebook = Codebook(CodebookParams(size=16, dim=2, decay=0.9, commitment_weight=1.0, dead_usage=0.0)).train()
    batch = torch.randn(64, 2) + 50
    codebook(batch)
    assert (codebook.vectors_KD - 50).abs().max() < 5
    assert len(codebook.eval().assign(batch).unique()) >= 8


def test_a_collapsed_codebook_recovers_by_replacing_dead_codes() -> None:
    def used_codes(dead_usage: float) -> int:
        torch.manual_seed(0)
        codebook = Codebook(CodebookParams(size=16, dim=2, decay=0.9, commitment_weight=1.0, dead_usage=dead_usage)).train()
        codebook(torch.full((64, 2), 1e3))  # all codes start at one point, far from later batches
        for _ in range(100):
            codebook(torch.randn(64, 2))
        return len(codebook.eval().assign(torch.randn(1000, 2)).unique())

    assert used_codes(dead_usage=0.0) <= 2
    assert used_codes(dead_usage=0.05) >= 12
