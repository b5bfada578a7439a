"""What a compiled kernel that starts early must look like; see :func:`panscan.core.jit.wait_for_inputs`."""

_NOT_BEFORE = ("@", "atom", "bra", "cp.", "ld.global", "ld.shared", "red", "ret", "st.")


def check_waits(ptx: str) -> None:
    """Assert that every program waits once, before it reads or writes memory, and then lets the next kernel start."""
    lines = [line.strip() for line in ptx.splitlines()]
    waits, starts = (
        [at for at, line in enumerate(lines) if line.startswith(f"griddepcontrol.{name}")]
        for name in ("wait", "launch_dependents")
    )
    assert len(waits) == len(starts) == 1 and waits < starts, (waits, starts)
    before = [line for line in lines[: waits[0]] if line.startswith(_NOT_BEFORE)]
    assert not before, before
