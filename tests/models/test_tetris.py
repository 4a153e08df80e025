from __future__ import annotations

import pytest
import torch

pytest.importorskip("e3nn")

from e3nn import o3

from insum_nn.models.tetris import TETRIS_NAMES, TetrisClassifier, radius_edges, tetris_pieces


def test_the_pieces_are_different_and_one_pair_is_chiral():
    positions, batch, labels = tetris_pieces()
    assert len(TETRIS_NAMES) == len(labels) == 8
    pieces = positions.reshape(8, 4, 3)
    spectra = [torch.cdist(p, p).flatten().sort().values for p in pieces]
    same = [(i, j) for i in range(8) for j in range(i) if torch.allclose(spectra[i], spectra[j])]
    assert same == [(1, 0)]
    assert batch.bincount().tolist() == [4] * 8


def test_edges():
    positions, batch, _ = tetris_pieces()
    receivers, senders = radius_edges(positions, batch, 1.1)
    assert torch.equal(batch[receivers], batch[senders])
    assert not bool((receivers == senders).any())
    # Three faces hold four cubes together; in a square there are four.
    assert receivers.numel() == 2 * (3 * 8 + 1)


@pytest.mark.parametrize("reflect", [1, -1])
def test_logits_under_rotation_and_reflection(reflect: int):
    model = TetrisClassifier().double().eval()
    positions, batch, _ = tetris_pieces()
    positions = positions.double()
    turn = o3.rand_matrix(dtype=torch.float64) * reflect
    logits, turned = (model(p, batch, 8).detach() for p in (positions, positions @ turn.T + 3.0))
    if reflect == -1:
        turned = turned[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    assert torch.allclose(logits, turned, atol=1e-10)


def test_it_learns_all_pieces():
    torch.manual_seed(1)
    model = TetrisClassifier(num_features=4)
    positions, batch, labels = tetris_pieces()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(positions, batch, 8), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    turns = o3.rand_matrix(8)
    turned = torch.einsum("nij,nj->ni", turns[batch], positions)
    assert torch.equal(model(turned, batch, 8).argmax(1), labels)
    assert torch.equal(model(-turned, batch, 8).argmax(1), torch.tensor([1, 0, 2, 3, 4, 5, 6, 7]))


def test_on_each_device(device: torch.device):
    model = TetrisClassifier(num_features=4).eval()
    positions, batch, _ = tetris_pieces()
    expected = model(positions, batch, 8)
    got = model.to(device)(positions.to(device), batch.to(device), 8)
    assert torch.allclose(got.cpu(), expected, atol=1e-4)
