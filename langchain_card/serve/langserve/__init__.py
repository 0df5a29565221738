"""LangServe's interface, for its client `RemoteRunnable` and its playgrounds; needs the extra `langserve`.

The routes are implemented here: LangServe's own handlers answer every failure with a bare 500, ignore disconnected
clients and do not limit batches. Only the playgrounds and, for users, the client come from LangServe.

LangServe has been deprecated since November 2024 and is not open source: the LangServe License forbids offering it as a
hosted or managed service. It is therefore an extra.
"""
