"""Families: every kind of attention that is recognised, each in a folder of its own."""

from __future__ import annotations

from asapc.passes.esp.match import find_esp
from asapc.passes.lot.match import find_lot
from asapc.passes.plan.match import find_plan
from asapc.passes.sinkhorn.banded import find_banded
from asapc.passes.sinkhorn.match import find_sinkhorn
from asapc.passes.site import Find

# In this order: half a glued plan looks like a loop, a band that no example is long enough to show looks
# like none, where a loop is found nothing is sorted, and a loop between queries, keys and values can be
# more than one on scores that are given.
MATCHERS: tuple[Find, ...] = (find_lot, find_banded, find_sinkhorn, find_esp, find_plan)
