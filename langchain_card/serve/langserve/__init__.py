"""LangServe's interface, for its client `RemoteRunnable` and its playgrounds; needs the extra `langserve`.

The routes are our own, in LangServe's words: its own handlers answer every failure with a bare 500, do not notice that
a client has left, and bound no batch. Of the package come the playgrounds and, for users, the client.

LangServe is deprecated by its makers since November 2024, and not open source: the LangServe License does not allow to
offer it as a hosted or managed service. That is why it is an extra.
"""
