"""Identify: what is found in a program, in the spelling of it that shows the most sites.

A program is matched as it was captured, and with factors of scores at the queries, fused attention spelt
out, scalings joined with their maps, masks of numbers that are booleans, or sums of maps split. Each of
these rewrites stays only where it shows a site.
"""

from __future__ import annotations

from dataclasses import replace

from asapc.ir import Program
from asapc.passes.differences import explained, maps_apart
from asapc.passes.factors import moved_factors
from asapc.passes.fused import fused_calls, spelt_out, why_it_stays
from asapc.passes.match import Outcomes, match
from asapc.passes.number_masks import with_boolean_masks
from asapc.passes.regions import Refusal
from asapc.passes.scalings import joined_program
from asapc.passes.site import Site


def matched_program(program: Program) -> tuple[Program, Outcomes]:
    """What is found in a program, and the program it was found in: as captured, or rewritten."""
    scaled = moved_factors(program)
    if scaled is None:
        return _matched(program)
    with_factors = _matched(scaled)
    if _shows_all(with_factors[1]):
        return with_factors
    as_it_was = _matched(program)
    return as_it_was if _sites(as_it_was[1]) > _sites(with_factors[1]) else with_factors


def _matched(program: Program) -> tuple[Program, Outcomes]:
    reasons: dict[str, str] = {}
    if program.softmax:
        program, outcomes, reasons = _with_softmax(program)
    else:
        outcomes = match(program)
    for rewrite in (joined_program, with_boolean_masks):
        rewritten = None if _shows_all(outcomes) else rewrite(program)
        if rewritten is not None and _sites(again := match(rewritten)) > _sites(outcomes):
            program, outcomes = rewritten, again
    program, outcomes = maps_apart(program, outcomes)
    return program, [
        replace(one, reason=reasons[one.node])
        if isinstance(one, Refusal) and one.node in reasons else one
        for one in outcomes
    ]  # fmt: skip


def _with_softmax(program: Program) -> tuple[Program, Outcomes, dict[str, str]]:
    """With the fused calls spelt out that this shows to be sites, what is found there, and by name of the
    other calls why they are none."""
    why = {call: why_it_stays(call) for call in fused_calls(program)}
    plain = [call for call, reason in why.items() if reason is None]
    reasons = {call.name: reason for call, reason in why.items() if reason is not None}
    if not plain:
        return program, match(program), reasons
    spelt, products = spelt_out(program, plain)
    outcomes = match(spelt)
    known = explained(outcomes)
    shown = [call for call in plain if products[call] in known]
    if len(shown) == len(plain):
        return spelt, outcomes, reasons
    refusals = {one.name: one.reason for one in outcomes if isinstance(one, Refusal)}
    program = spelt_out(program, shown)[0] if shown else program
    outcomes = match(program)
    names = {one.node: one.name for one in outcomes if isinstance(one, Refusal)}
    reasons |= {
        call.name: refusals[names[call.name]] for call in plain
        if call not in shown and names[call.name] in refusals
    }  # fmt: skip
    return program, outcomes, reasons


def _sites(outcomes: Outcomes) -> int:
    return sum(isinstance(one, Site) for one in outcomes)


def _shows_all(outcomes: Outcomes) -> bool:
    return _sites(outcomes) == len(outcomes) > 0
