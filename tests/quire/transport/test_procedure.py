"""A procedure runs in a thread and in an event loop with the same results and the same errors."""

import asyncio
import gc
import weakref

import pytest

from quire.errors import BrokerUnavailable
from quire.transport.procedure import run, run_async


def in_thread(procedure, do):
    return run(procedure, do)


def in_loop(procedure, do):
    async def carry_out(step):
        return do(step)

    return asyncio.run(run_async(procedure, carry_out))


def double_or_fail(step):
    if step < 0:
        raise BrokerUnavailable(str(step))
    return 2 * step


@pytest.fixture(params=[in_thread, in_loop])
def carry_out(request):
    return request.param


def test_a_procedure_gets_the_results_and_the_errors_of_its_steps(carry_out):
    def procedure():
        found = [(yield 1), (yield 2)]
        try:
            yield -3
        except BrokerUnavailable as error:
            found.append(str(error))
        return found

    assert carry_out(procedure(), double_or_fail) == [2, 4, "-3"]


def test_what_a_procedure_does_not_handle_is_raised_and_holds_nothing(carry_out):
    class Held:
        pass

    def procedure(held):
        yield -1

    gc.collect()
    gc.disable()
    try:
        held = Held()
        gone = weakref.ref(held)
        with pytest.raises(BrokerUnavailable) as caught:
            carry_out(procedure(held), double_or_fail)
        del held, caught
        assert carry_out is in_loop or gone() is None, "no cycle keeps the frames of the error"
    finally:
        gc.enable()
