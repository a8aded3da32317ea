"""A search of a large graph considers the cuts that send the least, spread over the graph."""

from support.planning_cases import chain

from autopipe.ir.cuts import Cuts
from autopipe.planning.search.few_cuts import CUTS_PER_STAGE, KEPT_CUTS, MOST_CUTS, FewCuts, cuts_to_search


class Weighed(Cuts):
    """Cuts whose bytes are 10, 20, 30, 10, 20, 30, ... by position."""

    def crossing_bytes(self, position, batch_size):
        return 10 * (1 + position % 3)


def test_the_cheapest_cuts_are_kept_and_a_part_of_the_next_ones(monkeypatch):
    monkeypatch.setattr(FewCuts, "crossing_bytes", Weighed.crossing_bytes)
    cuts = Cuts(chain(31).graph)
    assert len(cuts.legal) == 30
    assert FewCuts(cuts, 10).legal == tuple(p for p in cuts.legal if p % 3 == 0)
    cheap, next_ones = ([p for p in cuts.legal if p % 3 == k] for k in (0, 1))
    assert FewCuts(cuts, 19).legal == tuple(sorted(cheap + next_ones[::2]))
    assert FewCuts(cuts, 20).legal == tuple(p for p in cuts.legal if p % 3 != 2)
    assert FewCuts(cuts, 5).legal == tuple(p for p in cuts.legal if p % 3 == 0)[::2]


def test_small_graphs_keep_all_cuts_and_large_ones_enough():
    cuts = Cuts(chain(31).graph)
    assert cuts_to_search(cuts, 4) is cuts
    many = Cuts(chain(MOST_CUTS + 200).graph)
    assert CUTS_PER_STAGE * 16 <= len(cuts_to_search(many, 16).legal) <= KEPT_CUTS
    assert len(cuts_to_search(many, 40).legal) > KEPT_CUTS
