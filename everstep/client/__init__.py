"""A typed client of the controller's REST API, for scripts and services.

Example::

    from everstep.client import Client, read_token

    with Client("https://controller:7700", read_token("olga.token")) as client:
        print(client.status().nodes)

``AsyncClient`` has the same methods as coroutines. Messages are those of ``everstep.wire.v1.operator``,
``operator_history`` and ``enrolment``, and errors those of ``everstep.errors``. What only the command line needs, such
as tables and the texts of its options, does not belong here.
"""

from everstep.client.calls import Health
from everstep.client.clients import AsyncClient, AsyncPagedList, Client, PagedList
from everstep.client.exchange import Call
from everstep.client.token_files import read_token

__all__ = ["AsyncClient", "AsyncPagedList", "Call", "Client", "Health", "PagedList", "read_token"]
