"""A verification: an endpoint's answers, the same weights on this machine, and the verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from panscan.core import EndpointError, Request
from panscan.load.chat import Endpoint
from panscan.verdict.evidence import (
    Fit,
    MappedAnswer,
    NoiseLevel,
    ReportedStep,
    VerdictWord,
    forced_tokens,
    judge_fit,
    map_answer,
)
from panscan.verdict.judgement import EXACT_RATIO
from panscan.verify.consistency import REQUESTS as CHECK_REQUESTS
from panscan.verify.consistency import Consistency, check_consistency
from panscan.verify.endpoint import EndpointAnswer, EndpointClient, VerifyOptions
from panscan.verify.explanation import (
    Evaluator,
    Explanation,
    HypothesisFit,
    ProbeAnswer,
    explained_word,
    find_explanation,
    judge_candidate,
    summary,
    unseen_changes,
)
from panscan.verify.hypotheses import CHANGES, REFERENCE
from panscan.verify.local import LocalModel, open_local
from panscan.workload.probes import long_probe, sample_probes

_MOST_FAILURES = 3  # in a row
_IMAGES_REFUSED = (400, 415, 422, 501)  # HTTP statuses; others, such as 408, 413 or 429, may pass
_LONG, _LONG_TOKENS = 8192, 4  # positions before an answer that shows RoPE and caches behind them; its length
_RARE, _NAMED = 4, 8  # an answer in so many has no explanation that concerns all; wrong ones that are named
_MOST_SPLITS = 16  # times that a text is tokenised again
_INCOMPLETE = re.compile("[\ud800-\udfff\ufffd]")  # a character cut between two tokens
OnProgress = Callable[[str], None]


@dataclass(slots=True)
class Verification:
    """The verdict on an endpoint, with its evidence.

    Args:
        url: URL of the endpoint.
        model: checkpoint of the reference.
        served_model: the endpoint's name of the model.
        server: server software that the endpoint reports.
        answers: the answer to each question.
        requests: HTTP requests sent.
        noise: divergence that rounding explains.
        word: exact, close, different or unknown.
        message: the verdict in a sentence, with cause and fix.
        explanation: hypothesis that explains the answers.
        reference: fit of the reference to the answers; None without answers.
        candidates: hypotheses that were compared over all answers, best first.
        tested: number of hypotheses that were compared at least in part.
        faults: request parameters that do not do what they say.
        wrong: ids of the answers that are clearly not the reference's.
        not_visible: faults that this verification could not detect.
    """

    url: str
    model: str
    served_model: str
    server: str | None
    answers: list[dict[str, Any]]
    requests: int
    noise: NoiseLevel = field(default_factory=lambda: NoiseLevel(None, 0.0))
    word: VerdictWord = "unknown"
    message: str = ""
    explanation: Explanation = field(default_factory=lambda: Explanation(None, "none"))
    reference: HypothesisFit | None = None
    candidates: list[HypothesisFit] = field(default_factory=list)
    tested: int = 0
    faults: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    not_visible: list[str] = field(default_factory=list)


def verify_endpoint(
    options: VerifyOptions, probes: Sequence[Request] | None = None, on_progress: OnProgress = lambda _: None
) -> Verification:
    """Ask an endpoint, compute the same on this machine, and judge.

    Args:
        options: endpoint and settings to verify.
        probes: questions, whose images are bytes of PNG files; None: questions about sample documents.
        on_progress: called with what happens next.

    Raises:
        EndpointError: the endpoint cannot be reached.
        SettingError: the name of the served model is missing.
        ModelError: the checkpoint cannot be loaded.
        UnsupportedError: the checkpoint cannot be the reference on this machine.
    """
    endpoint = Endpoint(options.url, options.served_model or "", options.api_key, timeout=options.timeout)
    session = EndpointClient(
        endpoint, max_requests=options.max_requests, max_tokens=options.max_tokens, top_logprobs=options.top_logprobs
    )
    on_progress("looking up the served model")
    session.identify()
    on_progress(f"loading {options.settings.model_name}")
    with open_local(options.settings) as local:
        questions = probes or sample_probes(options.settings.pan_and_scan, view_size=local.view_size)
        attempts, notes = _ask_all(session, questions, on_progress)
        found, failed = usable_answers(attempts, local, options.max_tokens, notes)
        first = next((each for each in attempts if each.answer is not None and each.answer.text), None)
        consistency = Consistency()
        if first is not None and first.answer is not None and session.left >= CHECK_REQUESTS:
            on_progress("checking the endpoint against itself")
            consistency = check_consistency(session, first.request, first.answer)
        served, server = session.endpoint.model, session.server
        model = options.settings.model_name
        result = Verification(options.url, model, served, server, [], session.requests, faults=consistency.faults)
        conclude(result, local, found, notes, failed, on_progress)
        fault, unchecked = ("", f"positions beyond {_LONG:,}: asked only with the sample questions")
        if probes is None:
            fault, unchecked = check_long_text(session, local, on_progress)
        notes += [unchecked] if unchecked else []
        if fault and result.word in ("exact", "close"):
            result.word, result.message = "different", f"different: {fault}"
        if consistency.moved is not None and consistency.moved > result.noise.clear_margin:
            result.word = "different"
            result.message = (
                "different: the endpoint contradicts itself: log-probabilities of its answer move by"
                f" {consistency.moved:.2g} nats when the answer is part of a prompt. Prefill and decode differ: check"
                " its KV cache and attention backend"
            )
        result.requests = session.requests
        result.not_visible = [*_not_visible(session, found, failed), *consistency.notes, *notes]
        return result


def check_long_text(
    session: EndpointClient, local: LocalModel, on_progress: OnProgress, positions: int = _LONG
) -> tuple[str, str]:
    """Ask about a text of so many positions, and compare the answer with the reference, not with known faults.

    Returns:
        What is wrong, and what was not checked; both empty if the answer is the reference's.
    """
    probe = long_probe(positions, lambda text: len(local.tokens.encode(text)))
    not_checked = f"positions beyond {positions:,}: not checked"
    if local.positions < positions * 5 // 4:
        return "", f"{not_checked} (the model has {local.positions:,})"
    if session.capabilities.top_logprobs is None or session.left <= 0:
        why = "the limit of requests" if session.left <= 0 else "this needs log-probabilities"
        return "", f"{not_checked} ({why})"
    on_progress(f"a text of {positions:,} tokens")
    try:
        answer = session.variant(probe, max_tokens=_LONG_TOKENS)
    except EndpointError as error:
        return "", f"{not_checked} ({error})"
    found, _ = usable_answers([ProbeAttempt(probe, answer)], local, _LONG_TOKENS, [])
    evaluator = Evaluator(local, [probe for probe in found if len(probe.mapped)], on_progress)
    if not evaluator.probes:
        return "", f"{not_checked} (the answer is empty)"
    fit = evaluator.candidate(REFERENCE).fit
    if judge_fit(fit, evaluator.noise) != "different":
        return "", ""
    ratio = evaluator.noise.ratio(fit) or 0
    return (
        f"the answer about a text of {local.prompt_tokens(probe, REFERENCE):,} tokens is {ratio:,.2g}x the rounding"
        " noise away from the reference; those about shorter prompts match. Check the server's RoPE scaling, context"
        " length and KV cache"
    ), ""


@dataclass(slots=True)
class ProbeAttempt:
    """A question, and the endpoint's answer or why there is none."""

    request: Request
    answer: EndpointAnswer | None
    error: str | None = None
    status: int | None = None


def _ask_all(
    session: EndpointClient, questions: Sequence[Request], on_progress: OnProgress
) -> tuple[list[ProbeAttempt], list[str]]:
    """Ask the questions, the first one twice; return the attempts, and notes on what they cannot show."""
    attempts: list[ProbeAttempt] = []
    notes: list[str] = []
    failures = 0
    for number, request in enumerate(questions, start=1):
        can = session.capabilities
        if (request.images and not can.images) or (len(request.images) > 1 and not can.several_images):
            continue
        if not can.mm_processor_kwargs and request.pan_and_scan != questions[0].pan_and_scan:
            continue  # the endpoint refuses settings per request
        if session.left <= 0 or failures == _MOST_FAILURES:
            missed = len(questions) - number + 1
            why = "failures in a row" if session.left > 0 else f"the limit of {session.max_requests} requests"
            notes.append(f"{missed} of {len(questions)} questions: not asked ({why})")
            break
        on_progress(f"question {number} of {len(questions)}: {request.id}")
        attempts.append(_ask(session, request))
        failures = failures + 1 if attempts[-1].error is not None else 0
        if attempts[-1].error is not None:
            if attempts[-1].status in _IMAGES_REFUSED:  # no further request has images
                can = session.capabilities
                can.images &= len(request.images) != 1
                can.several_images &= len(request.images) < 2
        elif len(attempts) == 1 and session.left > len(questions):
            notes += _check_determinism(session, attempts[0])
    return attempts, notes


def _ask(session: EndpointClient, request: Request) -> ProbeAttempt:
    try:
        return ProbeAttempt(request, session.answer(request))
    except EndpointError as error:
        return ProbeAttempt(request, None, str(error), error.status)


def _check_determinism(session: EndpointClient, first: ProbeAttempt) -> list[str]:
    """Ask a question again; return notes on differences."""
    again = _ask(session, first.request)
    if again.answer is None or first.answer is None:
        return [] if again.error is None else [f"determinism: the repeated request failed ({again.error})"]
    if again.answer.text != first.answer.text:
        return ["determinism: the same greedy request gave two different answers"]
    pairs = zip(first.answer.steps, again.answer.steps, strict=False)
    moved = [
        abs(a.chosen.log_probability - b.chosen.log_probability)
        for a, b in pairs
        if a.chosen.log_probability is not None and b.chosen.log_probability is not None
    ]
    if max(moved, default=0.0) > 0:
        return [f"determinism: log-probabilities of a repeated request move by up to {max(moved):.2g} nats"]
    return []


def usable_answers(
    attempts: Sequence[ProbeAttempt],
    local: LocalModel,
    max_tokens: int,
    notes: list[str],
    *,
    ignore_eos: bool = False,
) -> tuple[list[ProbeAnswer], list[ProbeAttempt]]:
    """Return the usable answers in token ids, at most ``max_tokens`` each, and the failed requests."""
    found, dropped = [], 0
    for each in attempts:
        if each.answer is None:
            continue
        steps = each.answer.steps
        if not steps:
            tokens, mapped = _mapped_text(each.answer, each.request, local, ignore_eos=ignore_eos)
            found.append(ProbeAnswer(each.request, tokens, mapped, each.answer.prompt_tokens))
            continue
        if len(steps) > max_tokens:
            notes.append(
                f"{each.request.id}: {len(steps) - max_tokens} tokens beyond the limit of {max_tokens}: ignored"
            )
        steps = steps[:max_tokens]
        tokens, mapped = _mapped(steps, each.request, local)
        dropped += mapped.dropped
        found.append(ProbeAnswer(each.request, tokens, mapped, each.answer.prompt_tokens))
        if len(mapped) < len(steps):
            notes.append(f"{each.request.id}: {len(steps) - len(mapped)} tokens after one that cannot be identified")
    if dropped:
        notes.append(f"reported tokens that cannot be identified: {dropped}, counted with all others")
    return found, [each for each in attempts if each.answer is None]


def _mapped_text(
    answer: EndpointAnswer, request: Request, local: LocalModel, *, ignore_eos: bool
) -> tuple[list[int], MappedAnswer]:
    """Return the tokens of an answer without log-probabilities: the most probable ones that write its text.

    A model may write a text with other tokens than the tokenizer. Where the reference prefers another token that also
    continues the text, that token is taken, and the rest of the text is tokenised again. An answer with an incomplete
    character ends before it. The last token of an unfinished answer is omitted, because it may be the start of a longer
    one. A finished answer has its end, unless the endpoint counted more tokens and so removed some from the text.
    If answers go on after their end, the text lacks the end token: it is used up to where the reference would end.
    """
    text = _INCOMPLETE.split(answer.text, maxsplit=1)[0]
    rest, tokens, done = text.encode(), local.tokens.encode(text), 0
    finished = answer.finish_reason == "stop" and text == answer.text
    rows = local.log_probabilities(request, tokens, REFERENCE)
    for _ in range(_MOST_SPLITS):
        other = None
        while done < len(tokens) and other is None:
            writing = local.tokens.starting(rest)
            best = max(writing, key=lambda token: float(rows[done][token]), default=tokens[done])
            if ignore_eos and int(rows[done].argmax()) in local.tokens.eos_ids:
                tokens = tokens[:done]
            elif best != tokens[done]:
                other = best
            else:
                rest, done = rest[len(local.tokens.text(best)) :], done + 1
        if other is None:
            break
        after = rest[len(local.tokens.text(other)) :].decode(errors="replace")
        tokens = [*tokens[:done], other, *local.tokens.encode(after)]
        rows = local.log_probabilities(request, tokens, REFERENCE)
    else:
        finished, tokens = False, tokens[: done + 1]
    if finished and (answer.output_tokens or 0) <= len(tokens) + 1:
        row = local.log_probabilities(request, [*tokens, 0], REFERENCE)[-1]
        tokens.append(max(local.tokens.eos_ids, key=lambda token: float(row[token])))
    elif not finished:
        tokens = tokens[:-1]
    return tokens, MappedAnswer(list(tokens), [{} for _ in tokens])


def _mapped(steps: Sequence[ReportedStep], request: Request, local: LocalModel) -> tuple[list[int], MappedAnswer]:
    """Return the token ids to force, and the answer in token ids.

    If several tokens have the same text, the reference decides; then later positions are computed again.
    """
    tokens = forced_tokens(steps, local.tokens)
    mapped = MappedAnswer([], [])
    for _ in range(len(tokens) + 1):
        mapped = map_answer(steps, local.tokens, local.log_probabilities(request, tokens, REFERENCE))
        at = next((at for at, (a, b) in enumerate(zip(tokens, mapped.tokens, strict=True)) if a != b), None)
        if at is None:
            break
        if mapped.tokens[at] is None:  # what follows it is unknown, its own position is not
            tokens = tokens[: at + 1]
            return tokens, mapped.cut(at + 1)
        tokens[at] = int(mapped.tokens[at] or 0)
    return tokens, mapped


def conclude(
    result: Verification,
    local: LocalModel,
    probes: Sequence[ProbeAnswer],
    notes: list[str],
    failed: Sequence[ProbeAttempt],
    on_progress: OnProgress,
) -> None:
    """Judge usable answers and explain the verdict in ``result``; add to ``notes`` what the answers do not show."""
    evaluator = Evaluator(local, [probe for probe in probes if len(probe.mapped)], on_progress)
    result.noise = evaluator.noise
    result.answers = [
        {
            "id": probe.request.id,
            "tokens": list(probe.tokens),
            "text": b"".join(map(local.tokens.text, probe.tokens)).decode(errors="replace"),
            "images": len(probe.request.images),
            **local.inputs(probe.request),
            "prompt_tokens": probe.prompt_tokens,
            "expected_prompt_tokens": local.prompt_tokens(probe.request, REFERENCE),
        }
        for probe in probes
    ]
    result.answers += [{"id": attempt.request.id, "error": attempt.error} for attempt in failed]
    reason = next((str(each.error) for each in failed), "the endpoint's answers are empty")
    if evaluator.probes:
        result.reference = evaluator.candidate(REFERENCE)
        result.word = judge_candidate(result.reference, evaluator.noise, images=local.view_size is not None)
        result.wrong = evaluator.wrong_answers()
        if result.wrong and result.word in ("exact", "close"):
            result.word = "different"
        reason = _explained(result, evaluator, notes)
        if result.word == "unknown":
            reason = _no_verdict(evaluator, failed)
    result.message = summary(result.word, result.explanation, reason)
    result.tested = evaluator.tested


def _explained(result: Verification, evaluator: Evaluator, notes: list[str]) -> str:
    """Find what explains the answers, set the final verdict, and return its reason; empty if there is none to add."""
    reference, noise = result.reference, evaluator.noise
    assert reference is not None  # there are answers
    if result.word == "unknown":
        return ""
    if 0 < _RARE * len(result.wrong) <= len(evaluator.probes):
        named = ", ".join(result.wrong[:_NAMED]) + (", ..." if len(result.wrong) > _NAMED else "")
        return (
            f"{len(result.wrong)} of {len(evaluator.probes)} answers are not the reference's ({named}), the others are:"
            " a fault that depends on other requests, such as mixed-up images, a stale cache or a wrong batch"
        )
    if _samples_tokens(evaluator, reference.fit):
        wrong = f"{reference.fit.clear - reference.fit.agree} of {reference.fit.clear} clear tokens"
        return (
            f"the log-probabilities match the reference, but {wrong} are not the most probable ones. The endpoint does"
            " not decode greedily: make it apply temperature 0 and no penalties"
        )
    right = result.word == "exact" or (result.word == "close" and (noise.kl is None or noise.explains(reference.fit)))
    if not right or not reference.counts_fit:
        result.explanation, result.candidates = find_explanation(evaluator, reference)
        images = evaluator.local.view_size is not None
        word = explained_word(result.word, reference, result.explanation, noise, images=images)
        if right and word == "different":
            notes.append("only the prompt token counts show the difference; the answers do not")
        elif right:
            result.explanation = Explanation(None, "none")
            notes.append("prompt token counts: ignored, because the reported counts match no known prompt")
        found = result.explanation.candidate
        equivalent = found is not None and not found.plain_changes and result.explanation.strength == "matches"
        result.word, right = word, word in ("exact", "close") and (right or equivalent)
    if not right:
        return ""
    unseen = unseen_changes(evaluator, reference)
    if unseen:
        titles = "; ".join(CHANGES[name].title for name in unseen)
        notes.append(f"faults too small to show in these answers: {titles}")
    return _agreement(result, evaluator)


def _agreement(result: Verification, evaluator: Evaluator) -> str:
    """Return how well the reference, or an equivalent computation, explains the answers."""
    best = result.explanation.candidate or result.reference
    assert best is not None  # there are answers
    if evaluator.noise.kl is None:
        tokens = f"{best.fit.agree} of {best.fit.clear} clear greedy tokens"
        return f"{tokens} match the reference; exact needs log-probabilities"
    partly = "" if result.word == "exact" else "; exact needs log-probabilities of answers about images"
    return (
        f"the endpoint computes what {result.model} computes: {evaluator.noise.ratio(best.fit) or 0:.2g}x the rounding"
        f" noise over {best.fit.positions} tokens of {len(evaluator.probes)} answers{partly}"
    )


def _samples_tokens(evaluator: Evaluator, fit: Fit) -> bool:
    """Return whether log-probabilities fit the reference but rank other tokens above the endpoint's choices."""
    ratio = evaluator.noise.ratio(fit)
    if ratio is None or ratio > EXACT_RATIO or evaluator.noise.explains(fit):
        return False
    steps = [step for each in evaluator.probes for step in zip(each.mapped.tokens, each.mapped.reported, strict=True)]
    return any(token in reported and reported[token] < max(reported.values()) for token, reported in steps)


def _no_verdict(evaluator: Evaluator, failed: Sequence[ProbeAttempt]) -> str:
    """Return why usable answers give no verdict."""
    if any(probe.request.images for probe in evaluator.probes) or evaluator.local.view_size is None:
        which = "" if evaluator.local.view_size is None else " about images"
        return f"the answers{which} have no token that the reference clearly prefers"
    error = next((each.error for each in failed if each.request.images), None)
    return "no question about an image was answered" + (f": {error}" if error else "")


def _not_visible(session: EndpointClient, probes: Sequence[ProbeAnswer], failed: Sequence[ProbeAttempt]) -> list[str]:
    """Return what the endpoint's refusals hide."""
    can, found = session.capabilities, []
    reasons = can.refusals
    if can.top_logprobs is None:
        why = f" ({reasons['logprobs']})" if "logprobs" in reasons else ""
        found.append(f"distributions: the endpoint reports no log-probabilities{why}; only greedy tokens are compared")
    elif "logprobs" in reasons:
        found.append(f"log-probabilities beyond the {can.top_logprobs} most probable tokens ({reasons['logprobs']})")
    if "mm_processor_kwargs" in reasons:
        found.append(f"pan and scan on request: mm_processor_kwargs refused ({reasons['mm_processor_kwargs']})")
    if probes and not can.prompt_tokens:
        found.append("prompt token counts: the endpoint reports no usage")
    if not can.images:
        found.append("images: the endpoint refuses them")
    elif not can.several_images:
        found.append("several images in a request: the endpoint refuses them")
    found += [f"{each.request.id}: {each.error}" for each in failed]
    return found


def as_json(found: Verification) -> dict[str, Any]:
    """Return a verification as JSON values."""
    explanation, noise = found.explanation, found.noise
    best = explanation.candidate
    return {
        "schema": 1,
        "url": found.url,
        "model": found.model,
        "served_model": found.served_model,
        "server": found.server,
        "verdict": found.word,
        "message": found.message,
        "diagnosis": None
        if best is None
        else {
            "hypothesis": best.hypothesis.name,
            "title": best.hypothesis.title,
            "cause": best.hypothesis.cause,
            "strength": explanation.strength,
            "rivals": [each.name for each in explanation.rivals],
        },
        "noise": asdict(noise),
        "evidence": [
            {"hypothesis": each.hypothesis.name, "ratio": noise.ratio(each.fit), **asdict(each.fit)}
            for each in ([] if found.reference is None else [found.reference, *found.candidates])
        ],
        "hypotheses_compared": found.tested,
        "answers": found.answers,
        "wrong_answers": found.wrong,
        "parameter_faults": found.faults,
        "not_visible": found.not_visible,
        "requests": found.requests,
    }
