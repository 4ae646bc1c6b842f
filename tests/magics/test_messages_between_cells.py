"""Messages that cells leave, in a real kernel."""

from __future__ import annotations

import pytest

from tests.harness.kernel import Kernel
from tests.magics.cells import printed

pytestmark = pytest.mark.time_limit(90)


@pytest.mark.slow
@pytest.mark.fault("F35")
def test_messages_do_not_cross_cells(shared_kernel: Kernel) -> None:
    """A line names them and says how they can be kept; after `%config` they are, until it is set back."""
    kernel = shared_kernel
    kernel.run("%load_ext nbparallel\n%config NbParallel.welcome = False\n%parallel -n 2 pass")
    both = "rank 0 to rank 1, rank 1 to rank 0 (line 2"
    left = f"2 messages were not received, and dropped at the end of the cell: {both}, tag 3)"
    how = "%config NbParallel.keep_messages = True keeps messages for later cells"
    send, receive = "%%parallel\nsend(rank, 1 - rank, tag=3)", "%%parallel\nrecv(src=1 - rank, tag=3)"
    assert printed(kernel.run(send)) == f"[nbparallel] {left}; {how}\n"
    failed = kernel.run(receive)
    assert failed.ename == "ParallelError"
    assert f"ended, 2 messages were dropped: {both}" in failed.evalue
    stays = "1 message stays for rank 1, not in this cell: rank 0 to rank 1 (line 2, tag 0)"
    assert printed(kernel.run("%%rank 0\nsend('hello', 1)")) == f"[nbparallel] {stays}\n"
    received = printed(kernel.run("%%rank 1\nrecv(src=0)"))
    assert "Out[rank 1]: 'hello'" in received
    assert "1 message of earlier cells was received: rank 0 to rank 1 (line 2 of In[" in received
    assert kernel.run("%config NbParallel.keep_messages = True").status == "ok"
    try:
        assert "2 messages were not received, and kept for later cells" in printed(kernel.run(send))
        kept = printed(kernel.run(receive))
        assert f"2 messages of earlier cells were received: {both} of In[" in kept
        assert "Out[rank 0]: 1" in kept
    finally:
        kernel.run("%config NbParallel.keep_messages = False")
    assert left in printed(kernel.run(send))
