"""A child process for tests: does what its parent's messages say."""

import os
import signal
import subprocess
import sys

from panscan.core import now
from panscan.core.child import Parent


def main() -> None:
    parent = Parent()
    while True:
        match parent.receive():
            case ("echo", content):
                parent.send(content)
            case ("from", channel):
                parent.send(parent.receive(channel))
            case ("print", lines):
                sys.stderr.write("".join(f"{number:099d}\n" for number in range(lines)))
                parent.send("printed")
            case "time":
                parent.send(now())
            case "start":
                parent.send(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE).pid)
            case "exit":
                sys.stderr.write("first\nthe library is\x1b broken\n\n")
                sys.exit(3)
            case "abort":
                os.kill(os.getpid(), signal.SIGABRT)
            case "hang":
                parent.send("hanging")
                # As in a C library, which looks neither at signals nor at the connection
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
                signal.sigwait({signal.SIGUSR1})
