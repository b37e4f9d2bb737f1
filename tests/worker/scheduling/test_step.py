"""A step is data: what a runner is given can leave the process and changes with nothing here."""

from __future__ import annotations

import pickle

from tests.worker.fake import check, make_engine, make_request
from worker.scheduling.step import StepPlan


def plans(engine, requests) -> list[tuple[StepPlan, bytes]]:
    """All plans with rows until the requests end, each with its bytes when it was made."""
    made, plan = [], engine.scheduler.plan

    def noted(*args):
        one = plan(*args)
        made.append((one, pickle.dumps(one)))
        return one

    engine.scheduler.plan = noted
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step(0.0)
        check(engine)
    return [(one, data) for one, data in made if one.rows]


def test_a_plan_is_the_same_after_all_that_it_was_made_from_has_changed():
    options = {"prompt_logprobs": 1}
    requests = [make_request(f"r{i}", range(9 * i + 3), 12, options=options) for i in range(4)]
    found = plans(make_engine(blocks=14, groups=2, depth=2), requests)
    assert len(found) > 20
    assert any(row.targets for plan, _ in found for row in plan.rows)
    for plan, data in found:
        assert pickle.loads(data) == plan


def test_a_row_says_where_its_tokens_begin_to_count_for_penalties():
    """Once for each stay in a slot, with what was said until then, at its first sampled token."""
    engine = make_engine(batch_tokens=4)
    request = make_request("r", range(7), 6, options={"frequency_penalty": 0.5})
    (sequence,) = request.sequences
    plan = engine.scheduler.plan
    seen = []

    def noted(*args):
        made = plan(*args)
        seen.extend((row.history, row.sampled) for row in made.rows)
        if len(seen) == 4:  # two chunks of the prompt, and two tokens more
            engine.scheduler.rollback(made)
            engine.scheduler.preempt(sequence)
            return StepPlan(made.step, (), ())
        return made

    engine.scheduler.plan = noted
    engine.submit(request)
    while not engine.idle:
        engine.step(0.0)
    told = [history for history, _ in seen if history is not None]
    first, again = told
    assert first == (list(range(7)), [])
    assert again == (list(range(7)), sequence.tokens[7:9])
    assert all(sampled for history, sampled in seen if history is not None)
