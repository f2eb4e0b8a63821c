"""Protocol version 1.

``training``    what is said about a job: specification, generations, rank reports
``directives``  what the controller asks of a node
``agent``       the agent's HTTP requests and their answers
``session``     the same and pushed directives as frames of one connection
``local``       frames on the node's unix sockets (trainer, launcher, agent, vault)
``transfer``    frames between vaults
``operator``    answers of the operator routes

All messages are ``msgspec`` structs. What tells something may have fields that the reader does not know, what asks for
something may not (``base``). JSON on HTTP, MessagePack on sockets.
"""
