from tests.worker.fake import make_engine, make_request


def served(*queue: tuple[str, int], **priorities: int) -> str:
    """The tenants in the order in which their requests of some tokens end, one at a time."""
    engine = make_engine(blocks=64, block_size=4, seqs=1, batch_tokens=8)
    for number, (tenant, tokens) in enumerate(queue):
        made = make_request(f"{number}", range(100 * number, 100 * number + tokens), 1)
        made.tenant, made.priority = tenant, priorities.get(tenant, 0)
        engine.submit(made)
    done = ""
    while not engine.idle:
        done += "".join(r.tenant or r.id for r, _ in engine.step(0.0) if r.finished)
    engine.scheduler._fair_queue.take("z", 1)
    assert len(engine.scheduler._fair_queue._ends) <= 2  # of those before only who was served last
    return done


def test_a_long_queue_lets_other_tenants_of_the_same_priority_pass() -> None:
    assert served(*[("a", 8)] * 4, *[("b", 8)] * 2) == "ababaa"
    assert served(*[("a", 8)] * 2, ("b", 16), ("b", 8), ("c", 8)) == "abcab"
    assert served(*[("a", 8)] * 3, ("b", 8), b=1) == "aaab"
    assert served(("", 8), ("", 16), ("", 4)) == "012"
