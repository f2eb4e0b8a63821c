"""Protocol version 1.

``training``          a job: specification, generations, rank reports
``directives``        the controller's orders to a node
``agent``             an agent's session with the controller: frames and messages
``enrolment``         credentials of nodes and people
``local``             frames on the node's Unix sockets (trainer, launcher, agent, vault)
``transfer``          frames between vaults
``vault_reports``     parity groups, and reports on orders to vaults
``operator``          requests and answers of the operator routes
``operator_history``  the same, about the past and the policy

All messages are ``msgspec`` structs. Reports and answers may have fields that the reader does not know; requests may
not (``base``). JSON on HTTP, MessagePack on sockets.
"""
