"""The questions about sample documents: few, and each change of the computation concerns one of them."""

from panscan.core import PanAndScan
from panscan.runners.generate import GenerateRunner
from panscan.verify.hypotheses import HYPOTHESES, REFERENCE
from panscan.verify.local import LocalModel
from panscan.workload.probes import sample_probes


def test_every_hypothesis_concerns_a_question(mini: GenerateRunner) -> None:
    local = LocalModel(mini.loaded, mini.settings)
    probes = sample_probes(PanAndScan(), view_size=local.view_size)
    listed = {each.name for probe in probes for each in local.hypotheses(probe)}
    longest = max(local.prompt_tokens(probe, REFERENCE) for probe in probes)
    of_other_checkpoints = {"no-rope-factor", "exact-embedding-scale"}  # the mini model has neither
    assert {each.name for each in HYPOTHESES} - listed == of_other_checkpoints
    assert len(probes) <= 12 and longest < 2000
    assert len({probe.id for probe in probes}) == len(probes)


def test_questions_keep_the_settings_of_a_user_who_wants_no_crops() -> None:
    off = PanAndScan(enabled=False)
    assert all(probe.pan_and_scan == off for probe in sample_probes(off, view_size=192) if probe.images)


def test_a_text_only_checkpoint_is_asked_about_text() -> None:
    assert not any(probe.images for probe in sample_probes(PanAndScan(), view_size=None))
