"""`AsyncEngine`: every caller awaits its own stream, and whatever becomes of callers, steps and thread, nobody waits
for ever and nothing stays behind. What must come out is told by the golden (the authors' greedy tokens) or by the
same request served alone; that nothing stays behind, by the engine's own counts going back to zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
import time

import pytest
from safetensors.torch import load_file

from miniserve import AsyncEngine, Engine, RequestOutput, SamplingParams
from miniserve.errors import EngineError, QueueFull, RequestError

IDLE = {"running": 0, "waiting": 0, "blocks_used": 0}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
AGES = SamplingParams(n=64, max_tokens=200, ignore_eos=True)  # eight at a time: no test waits for the end of it
PROMPT = [1, 2, 3]
NO_PARAMS = SamplingParams(n=10**9)


class Kill(BaseException):
    """What ends a thread: no `Exception`, so nothing that a request could be blamed for."""


@pytest.fixture(scope="module")
def golden(goldens):
    """Three prompts and the 24 tokens that follow each, from the authors' code."""
    expected = load_file(goldens / "lckv-cla2" / "expected.safetensors")
    return [(expected[f"input_ids.{i}"].tolist(), expected[f"greedy_ids.{i}"].tolist()) for i in range(3)]


@pytest.fixture(scope="module")
def shared_engine(goldens):
    return make_engine(goldens)


@pytest.fixture
def engine(shared_engine, monkeypatch):
    """An idle engine; what a test does to its methods is undone."""
    assert counts(shared_engine) == IDLE
    yield shared_engine
    monkeypatch.undo()
    assert counts(shared_engine) == IDLE


@pytest.fixture
def async_engine(engine):
    async_engine = AsyncEngine(engine)
    yield async_engine
    async_engine.close()


def make_engine(goldens, **settings):
    settings = {"dtype": "float32", "kv_cache_memory": "4MiB", "max_num_seqs": 8} | settings
    return Engine(goldens / "lckv-cla2", **settings)


def counts(engine):
    return {name: value for name, value in engine.stats().items() if name in IDLE}


async def until(condition, seconds=10.0):
    """Wait for something that must come; the bound is only there to fail instead of hanging."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.005)


async def until_idle(engine):
    await until(lambda: counts(engine) == IDLE and not engine.has_unfinished_requests())


async def until_running(engine):
    await until(lambda: engine.stats()["blocks_used"] > 0)


def tokens(output):
    return [sample.token_ids for sample in output.outputs]


async def collect(async_engine, prompt, params):
    return [output async for output in async_engine.stream(prompt, params)]


# -------------------------------------------------------------------- what comes out


def test_generate_gives_the_golden_tokens(async_engine, golden):
    async def run():
        return await asyncio.gather(*(async_engine.generate(prompt, GREEDY) for prompt, _ in golden))

    answers = asyncio.run(run())
    assert [tokens(answer) for answer in answers] == [[expected] for _, expected in golden]
    assert all(answer.finished for answer in answers)


def test_many_streams_at_once_equal_their_solo_runs(async_engine, engine, golden):
    params = [
        SamplingParams(temperature=t, seed=seed, n=1 + seed % 3, max_tokens=3 + 5 * (seed % 4), ignore_eos=True)
        for seed, t in enumerate([0, 0.3, 0.7, 1.0, 1.5] * 3)
    ]
    prompts = [golden[i % 3][0][: 3 + i] for i in range(len(params))]
    alone = [engine.generate(prompt, one)[0] for prompt, one in zip(prompts, params)]

    async def run():
        return await asyncio.gather(*(collect(async_engine, *pair) for pair in zip(prompts, params)))

    crowd = asyncio.run(run())
    assert [tokens(outputs[-1]) for outputs in crowd] == [tokens(output) for output in alone]
    assert [[s.finish_reason for s in outputs[-1].outputs] for outputs in crowd] == [["length"] * p.n for p in params]


def test_outputs_only_grow_and_only_the_last_is_finished(async_engine, golden):
    prompt, expected = golden[1]
    outputs = asyncio.run(collect(async_engine, prompt, GREEDY))
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(set(lengths)) and lengths[-1] == 24
    assert all(output.outputs[0].token_ids == expected[:length] for output, length in zip(outputs, lengths))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_final_only_gives_one_output(async_engine, golden):
    prompt, expected = golden[0]

    async def run():
        stream = await async_engine.submit(prompt, GREEDY, final_only=True)
        return [output async for output in stream]

    (only,) = asyncio.run(run())
    assert only.finished and tokens(only) == [expected]


def test_what_cannot_be_served_is_refused_by_submit(async_engine, engine):
    async def run():
        for prompt, params, param in (([], GREEDY, "prompt"), ([1, 256], GREEDY, "prompt"), (PROMPT, NO_PARAMS, "n")):
            with pytest.raises(RequestError) as refused:
                await async_engine.submit(prompt, params)
            assert refused.value.param == param

    asyncio.run(run())
    assert not engine.has_unfinished_requests()


def test_a_full_queue_refuses_and_the_others_go_on(goldens, golden, monkeypatch):
    engine = make_engine(goldens, max_num_seqs=1, max_waiting=2)
    may_step, step = threading.Event(), engine.step
    monkeypatch.setattr(engine, "step", lambda: may_step.wait() and step())
    async_engine = AsyncEngine(engine)
    prompt, expected = golden[0]

    async def run():
        streams = [await async_engine.submit(prompt, GREEDY, final_only=True) for _ in range(3)]
        with pytest.raises(QueueFull):
            await async_engine.submit(prompt, GREEDY)
        may_step.set()
        return [tokens(await anext(stream)) for stream in streams]

    assert asyncio.run(run()) == [[expected]] * 3
    async_engine.close()
    assert counts(engine) == IDLE


# -------------------------------------------------------------------- callers that go away


def test_leaving_a_stream_aborts_its_request(async_engine, engine):
    async def run():
        async with contextlib.aclosing(async_engine.stream(PROMPT, AGES)) as outputs:
            async for _ in outputs:
                break
        await until_idle(engine)

    asyncio.run(run())


@pytest.mark.parametrize("way", ["stream", "generate"])
def test_cancelling_aborts_and_disturbs_nobody(async_engine, engine, golden, way):
    prompt, expected = golden[2]

    async def run():
        call = collect(async_engine, PROMPT, AGES) if way == "stream" else async_engine.generate(PROMPT, AGES)
        leaver = asyncio.create_task(call)
        await until_running(engine)
        neighbour = asyncio.create_task(async_engine.generate(prompt, GREEDY))
        leaver.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaver
        assert tokens(await neighbour) == [expected]
        await until_idle(engine)

    asyncio.run(run())


def test_requests_may_be_left_in_any_state(async_engine, engine):
    """More than can run at once, so that some are waiting; each left after another number of outputs."""

    async def leave_after(number):
        outputs = async_engine.stream(PROMPT * (1 + number), SamplingParams(n=2, max_tokens=100, ignore_eos=True))
        async with contextlib.aclosing(outputs):
            for _ in range(number):
                await anext(outputs)

    async def run():
        tasks = [asyncio.create_task(leave_after(number)) for number in [0, 1, 2, 5] * 10]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(r) for r in results} <= {type(None), asyncio.CancelledError}
        await until_idle(engine)

    asyncio.run(run())


def test_leaving_while_the_request_is_handed_in(async_engine, engine, monkeypatch):
    tokenising, go_on = hold_tokenising(engine, monkeypatch)

    async def run():
        caller = asyncio.create_task(async_engine.generate(PROMPT, AGES))
        await until(tokenising.is_set)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        go_on.set()
        assert await asyncio.wait_for(async_engine.generate(PROMPT, GREEDY), 10)  # the engine has seen both by now
        await until_idle(engine)

    asyncio.run(run())


def test_the_loop_ending_while_a_request_is_handed_in(async_engine, engine, monkeypatch):
    """`asyncio.run` cancels what is left, and waits for the threads that it started."""
    tokenising, go_on = hold_tokenising(engine, monkeypatch)

    async def run():
        asyncio.get_running_loop().caller = asyncio.create_task(async_engine.generate(PROMPT, AGES))
        await until(tokenising.is_set)
        threading.Timer(0.1, go_on.set).start()

    asyncio.run(run())
    asyncio.run(until_idle(engine))


def hold_tokenising(engine, monkeypatch):
    """The next prompt is not taken in before the second event is set; the first tells that it is under way."""
    tokenising, go_on, encode = threading.Event(), threading.Event(), engine.intake.encode

    def slow(prompt):
        tokenising.set()
        assert go_on.wait(10)
        return encode(prompt)

    monkeypatch.setattr(engine.intake, "encode", slow)
    return tokenising, go_on


def test_a_loop_that_is_closed_does_not_hurt_the_others(async_engine, engine, golden):
    """Its stream is never closed: the request ends by itself, its outputs find nobody."""
    prompt, expected = golden[0]
    asyncio.run(async_engine.submit(prompt, LONG))
    assert tokens(asyncio.run(async_engine.generate(prompt, GREEDY))) == [expected]
    asyncio.run(until_idle(engine))


def test_an_answer_that_nobody_reads_does_not_pile_up(async_engine, engine, golden):
    """Only the newest output is kept, and the whole answer is still there when it is read at last."""
    prompt, expected = golden[0]

    async def run():
        stream = await async_engine.submit(prompt, LONG)
        await until_idle(engine)
        await asyncio.sleep(0)
        gc.collect()
        assert sum(type(thing) is RequestOutput for thing in gc.get_objects()) <= 1
        return [output async for output in stream]

    gc.collect()
    outputs = asyncio.run(run())
    assert outputs[-1].finished and len(outputs[-1].outputs[0].token_ids) == 60
    assert outputs[-1].outputs[0].token_ids[:24] == expected


def test_abort_by_id_ends_the_stream(async_engine, engine):
    async def run():
        stream = await async_engine.submit(PROMPT, AGES)
        await anext(stream)
        engine.abort(stream.request_id)
        last = [output async for output in stream][-1]
        assert last.finished and {sample.finish_reason for sample in last.outputs} == {"abort"}

    asyncio.run(run())


# -------------------------------------------------------------------- steps that fail


@pytest.mark.parametrize(
    "error", [RuntimeError("a kernel failed"), MemoryError()], ids=lambda error: type(error).__name__
)
def test_a_step_that_fails_ends_its_requests_and_no_others(goldens, golden, monkeypatch, error):
    engine = make_engine(goldens, max_num_seqs=2)
    async_engine = AsyncEngine(engine)
    fail_once(engine, monkeypatch, error, when=lambda: len(engine.scheduler.running) == 2)
    (first, _), (second, _), (third, expected) = golden

    async def run():
        streams = [await async_engine.submit(prompt, LONG) for prompt in (first, second)]
        waiting = asyncio.create_task(async_engine.generate(third, GREEDY))
        for stream in streams:
            with pytest.raises(EngineError):
                await asyncio.wait_for(drain(stream), 10)
        assert tokens(await asyncio.wait_for(waiting, 10)) == [expected]
        assert async_engine.alive
        assert tokens(await async_engine.generate(third, GREEDY)) == [expected]

    asyncio.run(run())
    async_engine.close()
    assert counts(engine) == IDLE


async def drain(stream):
    async for _ in stream:
        pass


def fail_once(engine, monkeypatch, error, when):
    """The model raises in the first step in which `when()` holds."""
    model, failed = engine.model, []

    class Failing:
        logits = model.logits

        def __call__(self, batch, kv_pool):
            if not failed and when():
                failed.append(True)
                raise error
            return model(batch, kv_pool)

    monkeypatch.setattr(engine, "model", Failing())


# -------------------------------------------------------------------- the thread's end


def test_death_of_the_thread_reaches_every_waiter(engine, monkeypatch):
    deaths, may_die, step = [], threading.Event(), engine.step

    def deadly():
        if may_die.is_set():
            raise Kill
        return step()

    monkeypatch.setattr(engine, "step", deadly)
    async_engine = AsyncEngine(engine, on_death=lambda: deaths.append(time.monotonic()))

    async def run():
        waiters = [asyncio.create_task(async_engine.generate(PROMPT, AGES)) for _ in range(5)]
        waiters += [asyncio.create_task(collect(async_engine, PROMPT, AGES)) for _ in range(5)]
        await until(lambda: engine.stats()["running"] == 8 and engine.stats()["waiting"] > 600)
        assert async_engine.alive
        died = time.monotonic()
        may_die.set()
        done, pending = await asyncio.wait(waiters, timeout=10)
        assert not pending and time.monotonic() - died < 1
        assert {type(waiter.exception()) for waiter in done} == {EngineError}
        assert not async_engine.alive and len(deaths) == 1
        with pytest.raises(EngineError):
            await asyncio.wait_for(async_engine.generate(PROMPT, GREEDY), 1)

    asyncio.run(run())
    async_engine.close()
    assert len(deaths) == 1


def test_close_ends_requests_under_way(engine):
    async_engine = AsyncEngine(engine)

    async def run():
        waiters = [asyncio.create_task(async_engine.generate(PROMPT, AGES)) for _ in range(4)]
        await until_running(engine)
        await asyncio.to_thread(async_engine.close)
        assert not async_engine.alive
        for waiter in waiters:
            with pytest.raises(EngineError):
                await asyncio.wait_for(waiter, 1)

    asyncio.run(run())
    assert counts(engine) == IDLE and not engine.has_unfinished_requests()


def test_close_takes_no_answer_away_that_is_complete(engine, golden):
    async_engine = AsyncEngine(engine)
    prompt, expected = golden[0]

    async def run():
        stream = await async_engine.submit(prompt, GREEDY)
        await until_idle(engine)
        async_engine.close()
        return [output async for output in stream][-1]

    assert tokens(asyncio.run(run())) == [expected]


def test_submit_after_close(engine):
    async_engine = AsyncEngine(engine)
    async_engine.close()
    async_engine.close()  # a second time is nothing

    async def run():
        for call in (async_engine.submit(PROMPT), async_engine.generate(PROMPT), collect(async_engine, PROMPT, GREEDY)):
            with pytest.raises(EngineError):
                await asyncio.wait_for(call, 1)

    asyncio.run(run())
    assert not engine.has_unfinished_requests()


def test_two_engines_in_one_process(async_engine, goldens, golden):
    other_engine = make_engine(goldens, max_num_seqs=2, block_size=4)
    other = AsyncEngine(other_engine)

    async def run():
        both = [which.generate(prompt, GREEDY) for which in (async_engine, other) for prompt, _ in golden]
        answers = await asyncio.gather(*both)
        other.close()
        assert not other.alive and async_engine.alive
        return [tokens(answer) for answer in [*answers, await async_engine.generate(golden[0][0], GREEDY)]]

    expected = [[tokens] for _, tokens in golden]
    assert asyncio.run(run()) == [*expected, *expected, expected[0]]
    assert counts(other_engine) == IDLE


def test_the_process_may_end_during_a_step(goldens):
    """The thread that steps is stopped before the interpreter goes: no abort, no wait for the request's end."""
    script = f"""
import asyncio
from miniserve import AsyncEngine, Engine, SamplingParams
async_engine = AsyncEngine(Engine({str(goldens / "lckv-cla2")!r}, max_num_seqs=64))
params = SamplingParams(n=64, max_tokens=200, ignore_eos=True)
asyncio.run(async_engine.submit([1, 2, 3], params))
while not async_engine.engine.stats()["running"]:
    pass
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
