"""Different servers in one run, what their metrics say, and the channel to a running job; without a server."""

import asyncio
import stat
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime import bench, config
from vime.cluster import Cluster
from vime.errors import VimeError
from vime.rollout import control
from vime.rollout.engine import Engine, flags
from vime.rollout.gauges import Gauges, Meter, balance, read, summary
from vime.rollout.generate import Slots
from vime.rollout.http import EngineDown
from vime.rollout.router import Router

PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 7.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 10.0
"""


def made(**sections):
    return config.validate({"model": "m", "data": {"prompts": "p.jsonl"}, **sections}, "test")


def test_tables_become_servers(tmp_path):
    tables = [
        {"count": 2, "vllm": {"max_num_seqs": 4, "port": 9000}, "env": {"CUDA_VISIBLE_DEVICES": "0"}},
        {"vllm": {"enable-prefix-caching": False}},
    ]
    cfg = made(engine=tables, vllm={"max-num-seqs": 8, "port": 8000, "block_size": 32})
    shared = {"block_size": 32}
    assert [s.vllm for s in cfg.servers] == [
        shared | {"max_num_seqs": 4, "port": 9000}, shared | {"max_num_seqs": 4, "port": 9001},
        shared | {"max_num_seqs": 8, "port": 8002, "enable_prefix_caching": False},
    ]  # fmt: skip
    first = Engine(cfg, 1, str(tmp_path))
    assert first.port == 9001 and first.arguments(1)["max_num_seqs"] == 4 and first.environment()["CUDA_VISIBLE_DEVICES"] == "0"
    more = Engine(cfg, 3, str(tmp_path), 77, {"max_num_seqs": 2})
    assert more.port == 77 and more.arguments(77)["max_num_seqs"] == 2 and more.arguments(77)["block_size"] == 32
    assert len(made(rollout={"num_engines": 3}).servers) == 3 and made(rollout={"engines": ["http://h:1"]}).servers == []
    assert len(made(rollout={"engines": ["http://h:1"]}, engine=[{}]).servers) == 1


def test_every_fault_of_the_tables_is_told_at_once():
    with pytest.raises(VimeError, match=r"2 faults(.|\n)*engine\.0\.cuont: unknown key; did you mean 'count'(.|\n)*engine\.1\.count"):
        made(engine=[{"cuont": 2}, {"count": 0}])
    with pytest.raises(VimeError) as e:
        made(engine=[{}, {"vllm": {"dtype": "bfloat16"}}], rollout={"num_engines": 2, "colocate": True}, train={"mode": "async"})
    for said in ("num_engines = 2 and 2 [[engine]] tables", "engine.1.vllm.dtype: all servers", 'colocate: servers that sleep.*"sync"'):
        assert said.partition(".*")[0] in str(e.value)


def test_arguments_that_are_given_several_times_and_switches_of_the_router(tmp_path):
    assert flags({"prefill": [["http://a", 9], ["http://b", "none"]]}) == ["--prefill", "http://a", "9", "--prefill", "http://b", "none"]
    assert "disable_retries" not in Router(made(router={"disable_retries": False}), ["http://a"], str(tmp_path)).arguments(1)


# ------------------------------------------------------------------ metrics


def test_the_page_is_read_and_summed_over_cores():
    assert read(PAGE) == {"running": 4, "waiting": 2, "tokens": 100, "iterations": 10}
    with pytest.raises(VimeError, match="lacks iterations, running"):
        read("<html>")


def look(running=1, tokens=0.0, iterations=0.0, **more):
    return {"running": running, "waiting": 0.0, "tokens": tokens, "iterations": iterations, **more}


def test_busy_is_a_running_request_and_a_step_since_the_last_look():
    m = Meter()
    m.add(look(1, 0, 0), 10.0)
    m.add(look(1, 5, 1), 11.0)  # busy
    m.add(look(1, 5, 1), 12.0)  # frozen by a weight update
    m.add(look(0, 9, 3), 13.0)  # it stepped, and has nothing to do now
    m.add(None, 15.0)  # down for two seconds
    m.add(look(1, 4, 2), 16.0)  # started anew: its counters begin at 0
    assert (m.seconds, m.looks, m.sums["tokens"], m.share("busy")) == (6.0, 5, 13.0, 2 / 6)


def test_a_summary_has_the_shares_and_speculation_where_there_is_any():
    even, odd = Meter(), Meter()
    for m, tokens in ((even, 30), (odd, 10)):
        m.add(look(), 0.0)
        m.add(look(2, tokens, 5, queue_s=3.0, queued=6, cache_queries=10, cache_hits=4), 2.0)
    got = summary([even, odd])
    assert got["rollout/engine_busy"] == got["rollout/engine_busy_min"] == 1.0 and got["rollout/engine_running"] == 4.0
    assert (got["rollout/engine_queue_s"], got["rollout/engine_prefix_hits"], got["rollout/engine_balance"]) == (0.5, 0.4, 1.5)
    assert "rollout/spec_acceptance" not in got and summary([]) == {}
    even.add(look(2, 40, 9, drafts=10, drafted=30, accepted=12), 3.0)
    got = summary([even, odd])
    assert (got["rollout/spec_drafted"], got["rollout/spec_acceptance"], got["rollout/spec_mean_len"]) == (30, 0.4, 2.2)
    table = bench.report({0: even, 1: odd}, ["http://a", "http://b"])
    assert [r["tokens/s"] for r in table["engines"]] == [40 / 3, 5.0] and table["all"]["tokens"] == 50 and table["all"]["balance"] == 1.6


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=8))
def test_balance_lies_between_even_and_one_server_alone(tokens):
    assert balance(tokens) == 0 if not sum(tokens) else 1 - 1e-9 <= balance(tokens) <= len(tokens) + 1e-9


def test_an_idle_server_is_named_once():
    g = Gauges(dict)
    g.close()
    idle = Meter()
    for i in range(12):
        idle.add(look(0, 0, 0), float(i))
    busy = Meter()
    for i in range(12):
        busy.add(look(1, i, i), float(i))
    assert g.idlers({0: busy, 1: idle}) == ({1}, {1}) and g.idlers({0: busy, 1: idle}) == ({1}, set())
    assert g.idlers({0: busy, 1: busy}) == (set(), set()) and g.idlers({1: idle})[1] == {1}


# ------------------------------------------------------------------ control


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "size"]), st.integers(1, 9)), max_size=60))
def test_permits_are_never_lost_when_their_number_changes(steps):
    async def go():
        slots, held = Slots(4), []

        async def hold(n, free):
            async with slots.take(n):
                await free.wait()

        for what, n in steps:
            if what == "size":
                slots.resize(n)
            elif what == "take":
                free = asyncio.Event()
                held.append((asyncio.create_task(hold(n, free)), free))
            elif held:
                _task, free = held.pop(0)
                free.set()
            await asyncio.sleep(0)
        for _task, free in held:
            free.set()
        for _ in range(20):
            await asyncio.sleep(0)
        async with asyncio.timeout(1):
            await asyncio.gather(*(task for task, _ in held))
            async with slots.take(slots.size):  # all of them are there
                pass
            assert slots.held == 0

    asyncio.run(go())


class FakeFleet:
    """The lists of a fleet; no server behind them."""

    def __init__(self):
        self.urls, self.out, self.external = ["http://a", "http://b"], set(), {1}

    def serving(self):
        return [i for i in range(len(self.urls)) if i not in self.out]

    def busy(self, i):
        return 3.0

    def version_at(self, i):
        raise EngineDown("gone")


def test_the_socket_answers_its_user_only_whatever_the_folders_length(tmp_path):
    folder = tmp_path / ("long" * 40) / "run"
    folder.mkdir(parents=True)
    with pytest.raises(VimeError, match=r"no run answers in .*control\.sock"):
        control.command(str(folder), "list", [])
    fleet = FakeFleet()
    served = control.Control(fleet, folder, None, None)
    try:
        assert stat.S_IMODE((folder / control.NAME).stat().st_mode) == 0o600
        assert [line.split()[:3] for line in control.command(str(folder), "list", []).splitlines()[1:]] == [
            ["0", "serving,", "down"],
            ["1", "serving,", "down"],
        ]
        for action, words, said in (
            ("drain", ["7"], "there is no engine 7"), ("drain", [], "drain takes N"), ("list", ["1"], "list takes nothing more"),
            ("replace", ["1", "max_num_seqs=3"], r"engine 1 \(http://b\) was started elsewhere"), ("add", ["http://a/"], "one of the run's already"),
        ):  # fmt: skip
            with pytest.raises(VimeError, match=said):
                control.command(str(folder), action, words)
        fleet.out = {1}
        with pytest.raises(VimeError, match=r"engine 0 \(http://a\) is the only one that serves"):
            control.command(str(folder), "drain", ["0"])
        with served._one, pytest.raises(VimeError, match=r"another .* is under way"):
            control.command(str(folder), "drain", ["0"])
    finally:
        served.close()
    assert not (folder / control.NAME).exists() and threading.active_count() < 50


def test_errors_name_the_server_by_number():
    cluster = Cluster(made(), None)
    cluster.fleet = FakeFleet()
    said = cluster.named(VimeError("503: No available workers: http://a is down, engine 1 (http://b) too, http://ab not", "fix")).what
    assert said == "503: No available workers: engine 0 (http://a) is down, engine 1 (http://b) too, http://ab not"
    assert Counter(said)["("] == 2
