"""A dry run that follows values: what decides how much is computed is decided truly, or for the most."""

import pytest

pytest.importorskip("torch")

import torch

from probes.dryrun.valued import ValuedTracker, selecting_all

TOKENS, EXPERTS, CHOSEN = 24, 8, 2


def weights(*shape: int) -> torch.Tensor:
    """A tensor that was there before: nothing is known of it."""
    with torch.utils._python_dispatch._disable_current_modes():
        return torch.empty(shape, device="meta")


def test_a_loop_over_experts_gives_each_its_share() -> None:
    """transformers' `experts` in a loop: one_hot, `nonzero`, `where`; JetMoe's: `scatter`, `sum`, `tolist`."""
    with ValuedTracker("meta"), selecting_all():
        chosen = weights(TOKENS, EXPERTS).topk(CHOSEN, dim=1).indices
        mask = torch.nn.functional.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        shares = [torch.where(mask[expert[0]])[1].numel() for expert in hit]
        sizes = torch.zeros(TOKENS, EXPERTS, device="meta").scatter(1, chosen, 1).long().sum(0).tolist()
    assert shares == sizes == [TOKENS * CHOSEN // EXPERTS] * EXPERTS


def test_positions_that_are_counted_on_the_host_are_true() -> None:
    with ValuedTracker("meta"), selecting_all():
        mask = torch.ones(2, 6, dtype=torch.int64, device="meta").tril()
        assert mask.sum(dim=1).tolist() == [1, 2]
        assert mask.cpu().tolist() == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]
        assert int(torch.tensor([3, 5], device="meta").max()) == 5
        assert mask.bool().nonzero().shape == (3, 2)


def test_what_weights_decide_is_taken_for_the_most() -> None:
    """A comparison and its opposite select all and nothing, not all twice."""
    with ValuedTracker("meta"), selecting_all():
        above = weights(5) > 0.5
        assert above.nonzero().numel() == 5
        assert (~above).nonzero().numel() == 0
        assert weights(5).nonzero().numel() == 5


def test_a_part_that_is_written_says_nothing_of_the_rest() -> None:
    """What is written into a view of unknown values is not known; unknown values in a known tensor make it unknown."""
    tracker = ValuedTracker("meta")
    with tracker, selecting_all():
        unknown = weights(4).long()
        unknown[:2] = torch.tensor([1, 2], device="meta")
        assert tracker.values.real(unknown) is None
        concrete = torch.zeros(4, dtype=torch.int64, device="meta")
        concrete[:2] = torch.tensor([1, 2], device="meta")
        assert concrete.tolist() == [1, 2, 0, 0]
        concrete[2:] = weights(2).long()
        assert tracker.values.real(concrete) is None


def test_what_dies_is_forgotten() -> None:
    tracker = ValuedTracker("meta")
    with tracker, selecting_all():
        for number in range(50):
            made = torch.full((3,), number, device="meta")
            assert made.tolist() == [number] * 3
            del made
            other = weights(3).long()  # may take the dead one's place
            assert tracker.values.real(other) is None
