"""Which shard gets which compression: against enumeration, and as users read it."""

import json
import random
from dataclasses import replace
from itertools import product

import pytest

from narrowcast.autotune import program
from narrowcast.autotune.choice_report import as_json, table
from narrowcast.autotune.problem import Group, Option, Shard
from narrowcast.autotune.solver import choose

CLOSE = 1e-6  # of the baseline's time


def shard(name, plain, none=None, kind="expert_ffn", **options):
    options["none"] = Option(plain if none is None else none)
    return Shard(name, kind, 1000, plain, options)


def group(name, *shards, plain_latency=0.0, overhead=0.0, is_current=False):
    return Group(name, shards, plain_latency, overhead, is_current)


def random_groups(rng, num_groups, num_shards, cache=lambda rng: rng.randrange(1, 9)):
    """Shards of various costs, some not worthwhile, some cached now, some with equal options."""

    def an_option(plain, cache_bytes):
        link, decoding = rng.choice([0.1, 0.2, 0.5, rng.random()]), rng.choice([0, rng.random()])
        switching = rng.choice([0, 0.3 * plain])
        return Option(link * plain, 0, 0, 0.6 * decoding * plain, 0, switching, 4.0, cache_bytes)

    groups = []
    for g in range(num_groups):
        shards = []
        for s in range(num_shards(rng)):
            plain, cache_bytes = rng.choice([1.0, 10 * rng.random()]), cache(rng)
            options = {
                "entropy": an_option(plain, 0),
                "exponent": an_option(plain, cache_bytes),
                "delta": an_option(plain, 2 * cache_bytes),
            }
            shards.append(shard(f"s{s}", plain, plain * rng.uniform(1, 1.1), **options))
        latency, is_current = rng.random(), rng.random() < 0.3
        groups.append(Group(f"g{g}", tuple(shards), latency, 2 * rng.random(), is_current))
    return groups


def totals(groups, compressions, margin=0.0):
    """What is minimised (seconds with cold caches and the margin), and the bytes of caches."""
    seconds, cache_bytes = 0.0, 0
    for one in groups:
        plain = one.plain_latency + sum(s.plain for s in one.shards)
        if one.name in compressions:
            taken = [s.options[compressions[one.name][s.name]] for s in one.shards]
            seconds += 0 if one.is_current else margin * plain
            seconds += one.overhead + sum(o.seconds for o in taken)
            cache_bytes += sum(option.cache_bytes for option in taken)
        else:
            seconds += plain
    return seconds, cache_bytes


def enumerated(groups, budget, margin):
    """The least seconds of all possible choices."""
    best = {0: 0.0}  # by cache bytes, over the groups so far
    for one in groups:
        ways = [totals([one], {})]
        for names in product(*(s.options for s in one.shards)):
            compressions = {s.name: name for s, name in zip(one.shards, names, strict=True)}
            ways.append(totals([one], {one.name: compressions}, margin))
        extended = {}
        for (used, so_far), (seconds, cache_bytes) in product(best.items(), ways):
            total = used + cache_bytes
            if total <= budget:
                extended[total] = min(extended.get(total, float("inf")), so_far + seconds)
        best = extended
    return min(best.values())


def test_the_exact_choice_is_the_best_of_all():
    rng = random.Random(1)
    for _ in range(80):
        groups = random_groups(rng, rng.randint(2, 3), lambda rng: rng.randint(1, 3))
        margin = rng.choice([0.0, 0.05, 0.3])
        plain = totals(groups, {})[0]
        most = sum(s.options["delta"].cache_bytes for one in groups for s in one.shards)
        for budget in {0, rng.randint(0, most), rng.randint(0, most // 2), most}:
            choice = choose(groups, budget, margin=margin)
            seconds, cache_bytes = totals(groups, choice.compressions, margin)
            assert seconds <= enumerated(groups, budget, margin) + CLOSE * plain
            assert choice.cache_bytes == cache_bytes <= budget
            assert choice.plain_seconds == pytest.approx(plain)
        assert choice == choose(groups, budget, margin=margin)
        free = choose(groups, None, margin=margin)
        assert (choice.unlimited_seconds, choice.unlimited_cache_bytes) == (
            free.seconds,
            free.cache_bytes,
        )
        assert totals(groups, free.compressions, margin)[0] == pytest.approx(
            enumerated(groups, most, margin), abs=CLOSE * plain
        )


@pytest.mark.parametrize("strategy", ["exact", "ratio"])
def test_the_budget_is_never_exceeded(strategy):
    rng = random.Random(2)
    for size in (10**3, 10**9 + 7, 10**13):
        cache = lambda rng, size=size: rng.randrange(size // 2, size)  # noqa: E731
        groups = random_groups(rng, 10, lambda _: 5, cache)
        most = choose(groups, None).cache_bytes
        for budget in (1, most // 7, most // 2, most - 1, most):
            assert totals(groups, choose(groups, budget, strategy).compressions)[1] <= budget


def test_the_budget_is_not_exceeded_within_the_solvers_tolerance():
    size = 10**15 // 3
    value = Option(0.1, cache_bytes=size)
    shards = [shard(f"s{i}", 1.0 + i / 10, delta=value) for i in range(4)]
    choice = choose([group("g", *shards)], 3 * size - 1)
    assert sorted(choice.compressions["g"].values()) == ["delta", "delta", "none", "none"]
    assert choice.compressions["g"]["s0"] == "none"
    assert choice.cache_bytes == 2 * size


def test_ties_go_to_plain_and_to_the_smaller_cache():
    ulp_better = shard("w", 0.1 + 0.2, entropy=Option(0.3), delta=Option(0.3, cache_bytes=8))
    assert choose([group("g", ulp_better)], None).compressions == {}
    equal = {"delta": Option(0.3, cache_bytes=8), "exponent": Option(0.1 + 0.2, cache_bytes=4)}
    taken = choose([group("g", shard("w", 1.0, **equal, entropy=Option(0.6)))], None)
    assert taken.compressions == {"g": {"w": "exponent"}}
    small, large = (
        shard(name, 1.0, delta=Option(0.5, cache_bytes=cache_bytes))
        for name, cache_bytes in (("small", 7), ("large", 8))
    )
    for shards in ((small, large), (large, small)):
        assert choose([group("g", *shards)], 8).cache_bytes == 7
    no_better = shard("w", 1.0, entropy=Option(0.3), delta=Option(0.2, 0.1, cache_bytes=8))
    assert choose([group("g", no_better)], None).cache_bytes == 0


def test_ratio_is_the_papers_rule():
    """Gains a byte: a 0.9 / 3, b 0.8 / 2, c 0.5 / 1, d 0.2 / 1, e -; the budget is 5."""
    shards = (
        shard("a", 1.0, delta=Option(0.1, cache_bytes=3), entropy=Option(0.7)),
        shard("b", 1.0, exponent=Option(0.6, cache_bytes=1), delta=Option(0.2, cache_bytes=2)),
        shard("c", 1.0, delta=Option(0.5, cache_bytes=1), entropy=Option(0.9)),
        shard("d", 1.0, delta=Option(0.8, cache_bytes=1)),
        shard("e", 1.0, delta=Option(1.2, cache_bytes=1), entropy=Option(1.3)),
    )
    groups = [group("g", *shards)]
    choice = choose(groups, 5, "ratio")
    # b and c leave 2: a does not fit, d does, e gains nothing.
    assert choice.compressions == {
        "g": {"a": "entropy", "b": "delta", "c": "delta", "d": "delta", "e": "none"}
    }
    assert choice.cache_bytes == 4
    assert choice.seconds == pytest.approx(0.7 + 0.2 + 0.5 + 0.8 + 1.0)
    assert choose(groups, 5, "exact").seconds == pytest.approx(0.1 + 0.2 + 0.9 + 1.0 + 1.0)
    # The group's overhead takes all that is gained.
    dear = [replace(groups[0], overhead=1.9)]
    assert choose(dear, 5, "ratio").compressions == {}
    assert choose([replace(dear[0], overhead=1.7)], 5, "ratio").compressions


def test_ratio_is_never_better_than_exact():
    rng = random.Random(3)
    worse = 0
    for _ in range(40):
        groups = random_groups(rng, 4, lambda rng: rng.randint(1, 6))
        budget, margin = rng.randint(0, 60), rng.choice([0.0, 0.1])
        ratio, exact = (
            totals(groups, choose(groups, budget, strategy, margin).compressions, margin)
            for strategy in ("ratio", "exact")
        )
        assert exact[0] <= ratio[0] + CLOSE * totals(groups, {})[0]
        worse += ratio[0] > 1.01 * exact[0]
    assert worse > 5


def test_a_group_of_tiny_shards_stays_plain():
    tiny = [shard(f"norm{i}", 1e-5, delta=Option(2e-6, cache_bytes=8)) for i in range(20)]
    large = shard("experts", 1.0, delta=Option(0.2, cache_bytes=8000))
    costs = {"plain_latency": 1e-3, "overhead": 2e-3}
    groups = [group("norms", *tiny, **costs), group("layer", large, *tiny, **costs)]
    choice = choose(groups, None)
    assert list(choice.compressions) == ["layer"]
    assert choice.compressions["layer"]["norm3"] == "delta"
    assert choice.reasons["norms", "norm3"] == "narrowing its group as a whole saves nothing"


def test_a_margin_must_be_saved():
    groups = [group("g", shard("w", 0.9, entropy=Option(0.8)), plain_latency=0.1, overhead=0.1)]
    assert choose(groups, None, margin=0.09).compressions
    choice = choose(groups, None, margin=0.11)
    assert not choice.compressions
    assert (
        choice.reasons["g", "w"]
        == "narrowing its group would save no more than the margin of 11.0%"
    )


def test_a_current_compression_stays_where_another_gains_too_little():
    is_current = Option(0.5, bits=8.0, cache_bytes=4)
    for gain, taken in ((0.05, "exponent"), (0.2, "delta")):
        value = Option(0.5 - gain, switching=0.1, cache_bytes=8)
        choice = choose([group("g", shard("w", 1.0, exponent=is_current, delta=value))], None)
        assert choice.compressions == {"g": {"w": taken}}
    assert choice.seconds == pytest.approx(0.3)  # without the cost of the cold cache
    value = Option(0.45, switching=0.1, cache_bytes=8)
    choice = choose([group("g", shard("w", 1.0, exponent=is_current, delta=value))], None)
    assert choice.reasons["g", "w"] == (
        "8.0 bits per value instead of 16; switching to delta would cost more than it saves"
    )


def test_narrowing_a_group_must_repay_its_cold_caches():
    for switching in (0.1, 0.3):
        one = group("g", shard("w", 1.0, delta=Option(0.8, switching=switching)))
        choice = choose([one], None)
        assert bool(choice.compressions) == (switching == 0.1)
    assert choice.reasons["g", "w"] == "switching its group would cost more than it saves"


def test_a_narrowed_group_stays_so_as_long_as_it_gains():
    for seconds, is_current, stays in (
        (0.96, False, False),
        (0.96, True, True),
        (1.01, True, False),
    ):
        one = group("g", shard("w", 1.0, delta=Option(seconds)), is_current=is_current)
        assert bool(choose([one], None, margin=0.05).compressions) == stays


def test_a_shard_whose_bits_jump_is_dropped():
    def choice_at(bits):
        value = Option(bits / 16, decoding=0.1, bits=bits, cache_bytes=8)
        shards = (
            shard("w1", 1.0, delta=value, entropy=Option(0.7, decoding=0.05, bits=11.2)),
            shard("w2", 1.0, delta=Option(0.3, bits=3.0, cache_bytes=8)),
        )
        return choose([group("g", *shards)], 16)

    assert choice_at(3.1).compressions == {"g": {"w1": "delta", "w2": "delta"}}
    assert choice_at(3.1).reasons["g", "w1"] == "3.1 bits per value instead of 16"
    jumped = choice_at(13.0)
    assert jumped.compressions == {"g": {"w1": "entropy", "w2": "delta"}}
    assert jumped.reasons["g", "w1"] == "11.2 bits per value instead of 16"
    assert jumped.cache_bytes == 8


def example():
    value = Option(0.1, decoding=0.1, bits=3.1, cache_bytes=2**20)
    shards = (
        shard("large", 1.0, delta=value, entropy=Option(0.7, bits=11.2)),
        shard("small", 0.9, delta=value),
        shard("noise", 0.1, kind="router", entropy=Option(0.11)),
        Shard("mask", "other", 8, 0.001, {"none": Option(0.001)}),
    )
    alone = shard("head", 0.4, none=0.4, delta=Option(0.2, cache_bytes=2**20))
    return [group("layer", *shards, overhead=0.01), group("head", alone, overhead=0.1)]


def test_every_shard_is_given_its_reason():
    choice = choose(example(), 2**20)
    assert choice.reasons == {
        ("layer", "large"): "11.2 bits per value instead of 16; "
        "the cache of delta does not fit the budget",
        ("layer", "small"): "3.1 bits per value instead of 16",
        ("layer", "noise"): "coding costs more than it saves",
        ("layer", "mask"): "it cannot be compressed",
        ("head", "head"): "the cache of delta does not fit the budget",
    }
    fast = [group("g", shard("w", 1e-3, entropy=Option(5e-4, decoding=0.1)))]
    assert choose(fast, None).reasons == {("g", "w"): "no compression is worthwhile on this link"}


def test_the_table_has_the_longest_shards_and_the_totals():
    groups = example()
    text = table(groups, choose(groups, 2**20), limit=3)
    head, *rows = text.splitlines()
    assert " ".join(head.split()) == (
        "shard kind compression values plain ms chosen ms gain ms cache MiB reason"
    )
    assert [row.split()[0] for row in rows[:3]] == ["large", "small", "head"]
    assert rows[1].split(maxsplit=8) == [
        *("small", "expert_ffn", "delta", "1,000", "900.00", "200.00", "700.00", "1.0"),
        "3.1 bits per value instead of 16",
    ]
    assert rows[3] == "and 2 more, which take less; the saved file has all"
    assert rows[-1] == (
        "Predicted gathers of a step: 2,401.00 ms plain, 1,411.00 ms as chosen. Caches take 1.0 "
        "MiB, of a budget of 1.0 MiB. Without a budget: 811.00 ms, with 3.0 MiB."
    )
    fast = [group("g", shard("w", 1e-3, entropy=Option(5e-4, decoding=0.1)))]
    assert table(fast, choose(fast, None)).splitlines()[-1] == (
        "All groups stay with baseline FSDP2, predicted at 1.00 ms of gathers a step. "
        "The main reason: no compression is worthwhile on this link."
    )


def test_the_json_has_every_shard():
    groups = example()
    choice = choose(groups, 2**20)
    saved = json.loads(json.dumps(as_json(groups, choice), allow_nan=False))
    assert {k: v for k, v in saved.items() if k != "groups"} == {
        "plain_seconds": choice.plain_seconds,
        "seconds": choice.seconds,
        "cache_bytes": 2**20,
        "budget_bytes": 2**20,
        "unlimited_seconds": choice.unlimited_seconds,
        "unlimited_cache_bytes": 3 * 2**20,
    }
    layer, head = saved["groups"]
    assert [layer["narrowed"], head["narrowed"]] == [True, False]
    assert [s["name"] for s in layer["shards"]] == ["large", "small", "noise", "mask"]
    small = layer["shards"][1]
    assert small["options"]["delta"] == pytest.approx(
        {
            **{
                "link": 0.1,
                "hashing": 0,
                "encoding": 0,
                "decoding": 0.1,
                "fetching": 0,
                "switching": 0,
            },
            **{"bits": 3.1, "cache_bytes": 2**20, "seconds": 0.2, "gain": 0.7},
        }
    )
    assert (small["compression"], small["cache_bytes"]) == ("delta", 2**20)
    assert small["gain"] == pytest.approx(0.7)
    assert small["reason"] == "3.1 bits per value instead of 16"
    assert (head["shards"][0]["compression"], head["shards"][0]["gain"]) == ("plain", 0)


def least_possible(groups, budget):
    """A lower bound on the seconds of all choices, by a Lagrange multiplier for memory."""

    def relaxed(price):
        seconds, used = 0.0, 0
        for one in groups:
            taken = [
                min(s.options.values(), key=lambda o: o.seconds + price * o.cache_bytes)
                for s in one.shards
            ]
            cache_bytes = sum(option.cache_bytes for option in taken)
            narrowed = one.overhead + sum(option.seconds for option in taken)
            if narrowed + price * cache_bytes < one.plain:
                seconds, used = seconds + narrowed, used + cache_bytes
            else:
                seconds += one.plain
        return seconds + price * (used - budget), used

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if relaxed(middle)[1] <= budget else (middle, high)
    return max(relaxed(low)[0], relaxed(high)[0])


def test_thousands_of_shards_are_solved():
    rng = random.Random(4)
    groups = random_groups(rng, 250, lambda _: 8, lambda rng: rng.randrange(10**3, 10**7))
    budget = choose(groups, None).cache_bytes // 3
    choice = choose(groups, budget)
    assert choice.cache_bytes <= budget
    bound = least_possible(groups, budget)
    assert bound <= totals(groups, choice.compressions)[0] <= (1 + 1e-5) * bound
    assert totals(groups, choose(groups, budget, "ratio").compressions)[0] > 1.05 * bound


def test_what_cannot_be_chosen_from_is_refused():
    groups = example()
    for budget in (-1, float("nan"), float("inf"), "4", True):
        with pytest.raises(ValueError, match="cache budget of"):
            choose(groups, budget)
    with pytest.raises(ValueError, match=r"strategy = 'best'; allowed: 'exact', 'ratio'"):
        choose(groups, None, "best")
    with pytest.raises(ValueError, match=r"w: delta costs .*link=nan.* leave such options out"):
        choose([group("g", shard("w", 1.0, delta=Option(float("nan"))))], None)
    with pytest.raises(ValueError, match="w needs an option 'none'"):
        choose([group("g", Shard("w", "other", 1, 1.0, {"entropy": Option(1.0)}))], None)
    with pytest.raises(ValueError, match="g: a time that is not finite"):
        choose([group("g", shard("w", 1.0), overhead=float("inf"))], None)


def test_where_the_program_takes_too_long_the_papers_rule_is_taken(monkeypatch, caplog):
    """All ranks wait for the one that solves."""
    rng = random.Random(0)
    groups = random_groups(rng, 20, lambda _: 20)
    budget = 300
    assert choose(groups, budget).compressions != choose(groups, budget, "ratio").compressions
    monkeypatch.setitem(program._OPTIONS, "time_limit", 0.0)
    late = choose(groups, budget)
    assert late.compressions == choose(groups, budget, "ratio").compressions
    assert late.cache_bytes <= budget
    assert "the paper's rule" in caplog.text
