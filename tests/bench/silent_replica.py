"""The process of a replica that hangs: it never sends a message."""

from panscan.core.child import Parent


def main() -> None:
    """Receive messages, until the parent ends this process."""
    parent = Parent()
    while True:
        parent.receive()
