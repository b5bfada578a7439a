"""A verification: an endpoint's answers, the same weights on this machine, and the verdict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict

from msgspec import Struct

from panscan.core import EndpointError, Request
from panscan.core.activity import activity
from panscan.core.foreign import JsonObject
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
Asked = tuple[Request, EndpointAnswer]


class Verification(Struct):
    """The verdict on an endpoint, with its evidence.

    Args:
        url: URL of the endpoint.
        model: checkpoint of the reference.
        served_model: the endpoint's name of the model.
        server: server software that the endpoint reports.
        answers: the answer to each question.
        requests: HTTP requests sent, or answers that a sample was taken from.
        failed: questions without an answer, and why.
        notes: what the answers do not show.
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
    answers: list[JsonObject] = []
    requests: int = 0
    failed: list[tuple[Request, EndpointError]] = []
    notes: list[str] = []
    noise: NoiseLevel = NoiseLevel(None, 0.0)
    word: VerdictWord = "unknown"
    message: str = ""
    explanation: Explanation = Explanation()
    reference: HypothesisFit | None = None
    candidates: list[HypothesisFit] = []
    tested: int = 0
    faults: list[str] = []
    wrong: list[str] = []
    not_visible: list[str] = []


def verify_endpoint(options: VerifyOptions, probes: Sequence[Request] | None = None) -> Verification:
    """Ask an endpoint, compute the same on this machine, and judge.

    Args:
        options: endpoint and settings to verify.
        probes: questions, whose images are bytes of PNG files; None: questions about sample documents.

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
    with activity("looking up the served model"):
        session.identify()
    model = options.settings.model_name
    with open_local(options.settings) as local:
        questions = probes or sample_probes(options.settings.pan_and_scan, view_size=local.view_size)
        result = Verification(options.url, model, session.endpoint.model, session.server)
        asked = _ask_all(result, session, questions)
        with activity("reading the answers"):
            answers = read_answers(local, asked, result.notes, options.max_tokens)
        first = next((pair for pair in asked if pair[1].text), None)
        consistency = Consistency()
        if first is not None and session.left >= CHECK_REQUESTS:
            with activity("checking the endpoint against itself"):
                consistency = check_consistency(session, *first)
        result.faults = consistency.faults
        conclude(result, local, answers)
        fault, unchecked = ("", f"positions beyond {_LONG:,}: asked only with the sample questions")
        if probes is None:
            fault, unchecked = check_long_text(session, local)
        result.notes += filter(None, [unchecked])
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
        failed = [f"{request.id}: {error}" for request, error in result.failed]
        result.not_visible = [*_not_visible(session, answers), *failed, *consistency.notes, *result.notes]
        return result


def check_long_text(session: EndpointClient, local: LocalModel, positions: int = _LONG) -> tuple[str, str]:
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
    try:
        with activity(f"a text of {positions:,} tokens"):
            answer = session.variant(probe, max_tokens=_LONG_TOKENS)
            [read] = read_answers(local, [(probe, answer)], [], _LONG_TOKENS)
    except EndpointError as error:
        return "", f"{not_checked} ({error})"
    evaluator = Evaluator(local, [read] if len(read.mapped) else [])
    if not evaluator.probes:
        return "", f"{not_checked} (the answer is empty)"
    fit = evaluator.reference.fit
    if judge_fit(fit, evaluator.noise) != "different":
        return "", ""
    ratio = evaluator.noise.ratio(fit) or 0
    return (
        f"the answer about a text of {local.prompt_tokens(probe, REFERENCE):,} tokens is {ratio:,.2g}x the rounding"
        " noise away from the reference; those about shorter prompts match. Check the server's RoPE scaling, context"
        " length and KV cache"
    ), ""


def _ask_all(result: Verification, session: EndpointClient, questions: Sequence[Request]) -> list[Asked]:
    """Ask the questions, the first one twice. Failures, and what the answers cannot show, are added to ``result``."""
    asked: list[Asked] = []
    failures = 0  # in a row
    for number, request in enumerate(questions, start=1):
        can = session.capabilities
        if (request.images and not can.images) or (len(request.images) > 1 and not can.several_images):
            continue
        if not can.mm_processor_kwargs and request.pan_and_scan != questions[0].pan_and_scan:
            continue  # the endpoint refuses settings per request
        if session.left <= 0 or failures == _MOST_FAILURES:
            missed = len(questions) - number + 1
            why = "failures in a row" if session.left > 0 else f"the limit of {session.max_requests} requests"
            result.notes.append(f"{missed} of {len(questions)} questions: not asked ({why})")
            break
        try:
            with activity(f"question {number} of {len(questions)}: {request.id}"):
                asked.append((request, session.answer(request)))
        except EndpointError as error:
            failures += 1
            result.failed.append((request, error))
            if error.status in _IMAGES_REFUSED:  # no further request has images
                can = session.capabilities
                can.images &= len(request.images) != 1
                can.several_images &= len(request.images) < 2
            continue
        failures = 0
        if len(asked) == 1 and not result.failed and session.left > len(questions):
            result.notes += _check_determinism(session, *asked[0])
    return asked


def _check_determinism(session: EndpointClient, request: Request, first: EndpointAnswer) -> list[str]:
    """Ask a question again; return notes on differences."""
    try:
        again = session.answer(request)
    except EndpointError as error:
        return [f"determinism: the repeated request failed ({error})"]
    if again.text != first.text:
        return ["determinism: the same greedy request gave two different answers"]
    pairs = zip(*([step.chosen.log_probability for step in answer.steps] for answer in (first, again)), strict=False)
    moved = max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=0.0)
    if moved > 0:
        return [f"determinism: log-probabilities of a repeated request move by up to {moved:.2g} nats"]
    return []


def read_answers(
    local: LocalModel,
    asked: Sequence[Asked],
    notes: list[str],
    max_tokens: int | None = None,
    *,
    ignore_eos: bool = False,
) -> list[ProbeAnswer]:
    """Return answers in token ids, at most ``max_tokens`` each; ``notes`` gets a line for each omission."""
    answers, dropped = [], 0
    for request, answer in asked:
        steps = answer.steps[:max_tokens]
        if beyond := len(answer.steps) - len(steps):
            notes.append(f"{request.id}: {beyond} tokens beyond the limit of {max_tokens}: ignored")
        if steps:
            tokens, mapped = _mapped(steps, request, local)
        else:
            tokens, mapped = _mapped_text(answer, request, local, ignore_eos=ignore_eos)
        dropped += mapped.dropped
        answers.append(ProbeAnswer(request, tokens, mapped, answer.prompt_tokens))
        if len(mapped) < len(steps):
            behind = len(steps) - len(mapped)
            notes.append(f"{request.id}: {behind} tokens after one that cannot be identified")
    if dropped:
        notes.append(f"reported tokens that cannot be identified: {dropped}, counted with all others")
    return answers


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
    text, known = _INCOMPLETE.split(answer.text, maxsplit=1)[0], local.tokens
    finished = answer.finish_reason == "stop" and text == answer.text
    rest, tokens, done, splits = text.encode(), known.encode(text), 0, 0
    rows = local.log_probabilities(request, tokens, REFERENCE)
    while done < len(tokens) and splits < _MOST_SPLITS:
        row = rows[done]
        if ignore_eos and int(row.argmax()) in known.eos_ids:
            tokens = tokens[:done]
            break
        best = max(known.starting(rest), key=lambda token: float(row[token]), default=tokens[done])
        rest = rest[len(known.text(best)) :]
        if best != tokens[done]:
            tokens = [*tokens[:done], best, *known.encode(rest.decode(errors="replace"))]
            rows, splits = local.log_probabilities(request, tokens, REFERENCE), splits + 1
        done += 1
    if splits == _MOST_SPLITS:
        finished, tokens = False, tokens[:done]
    if not finished:
        tokens = tokens[:-1]
    elif (answer.output_tokens or 0) <= len(tokens) + 1:
        end = local.log_probabilities(request, [*tokens, 0], REFERENCE)[-1]
        tokens.append(max(known.eos_ids, key=lambda token: float(end[token])))
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


def conclude(result: Verification, local: LocalModel, probes: Sequence[ProbeAnswer]) -> None:
    """Judge answers and explain the verdict in ``result``."""
    evaluator = Evaluator(local, [probe for probe in probes if len(probe.mapped)])
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
    result.answers += [{"id": request.id, "error": str(error)} for request, error in result.failed]
    reason = next((str(error) for _, error in result.failed), "the endpoint's answers are empty")
    if evaluator.probes:
        result.reference = evaluator.reference
        result.word = judge_candidate(result.reference, evaluator.noise, images=local.view_size is not None)
        result.wrong = evaluator.wrong_answers()
        if result.wrong and result.word in ("exact", "close"):
            result.word = "different"
        reason = _explained(result, evaluator)
        if result.word == "unknown":
            reason = _no_verdict(result, evaluator)
    result.message = summary(result.word, result.explanation, reason)
    result.tested = evaluator.tested


def _explained(result: Verification, evaluator: Evaluator) -> str:
    """Find what explains the answers, set the final verdict, and return its reason; empty if there is none to add."""
    reference, noise = evaluator.reference, evaluator.noise
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
        result.explanation, result.candidates = find_explanation(evaluator)
        images = evaluator.local.view_size is not None
        word = explained_word(result.word, reference, result.explanation, noise, images=images)
        if right and word == "different":
            result.notes.append("only the prompt token counts show the difference; the answers do not")
        elif right:
            result.explanation = Explanation()
            result.notes.append("prompt token counts: ignored, because the reported counts match no known prompt")
        best = result.explanation.candidate
        equivalent = best is not None and not best.plain_changes and result.explanation.strength == "matches"
        result.word, right = word, word in ("exact", "close") and (right or equivalent)
    if not right:
        return ""
    unseen = unseen_changes(evaluator)
    if unseen:
        titles = "; ".join(CHANGES[name].title for name in unseen)
        result.notes.append(f"faults too small to show in these answers: {titles}")
    return _agreement(result, evaluator)


def _agreement(result: Verification, evaluator: Evaluator) -> str:
    """Return how well the reference, or an equivalent computation, explains the answers."""
    best = result.explanation.candidate or evaluator.reference
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
    steps = [
        step for probe in evaluator.probes for step in zip(probe.mapped.tokens, probe.mapped.reported, strict=True)
    ]
    return any(token in reported and reported[token] < max(reported.values()) for token, reported in steps)


def _no_verdict(result: Verification, evaluator: Evaluator) -> str:
    """Return why usable answers give no verdict."""
    if any(probe.request.images for probe in evaluator.probes) or evaluator.local.view_size is None:
        which = "" if evaluator.local.view_size is None else " about images"
        return f"the answers{which} have no token that the reference clearly prefers"
    errors = [f": {error}" for request, error in result.failed if request.images]
    return "".join(["no question about an image was answered", *errors[:1]])


def _not_visible(session: EndpointClient, answers: Sequence[ProbeAnswer]) -> list[str]:
    """Return what the endpoint's refusals hide."""
    can, reasons, hidden = session.capabilities, session.capabilities.refusals, []
    if can.top_logprobs is None:
        why = f" ({reasons['logprobs']})" if "logprobs" in reasons else ""
        hidden.append(f"distributions: the endpoint reports no log-probabilities{why}; only greedy tokens are compared")
    elif "logprobs" in reasons:
        hidden.append(f"log-probabilities beyond the {can.top_logprobs} most probable tokens ({reasons['logprobs']})")
    if "mm_processor_kwargs" in reasons:
        hidden.append(f"pan and scan on request: mm_processor_kwargs refused ({reasons['mm_processor_kwargs']})")
    if answers and not can.prompt_tokens:
        hidden.append("prompt token counts: the endpoint reports no usage")
    if not can.images:
        hidden.append("images: the endpoint refuses them")
    elif not can.several_images:
        hidden.append("several images in a request: the endpoint refuses them")
    return hidden


def as_json(result: Verification) -> JsonObject:
    """Return a verification as JSON values."""
    explanation, noise = result.explanation, result.noise
    best = explanation.candidate
    return {
        "schema": 1,
        "url": result.url,
        "model": result.model,
        "served_model": result.served_model,
        "server": result.server,
        "verdict": result.word,
        "message": result.message,
        "diagnosis": None
        if best is None
        else {
            "hypothesis": best.hypothesis.name,
            "title": best.hypothesis.title,
            "cause": best.hypothesis.cause,
            "strength": explanation.strength,
            "rivals": [rival.name for rival in explanation.rivals],
        },
        "noise": asdict(noise),
        "evidence": [
            {"hypothesis": candidate.hypothesis.name, "ratio": noise.ratio(candidate.fit), **asdict(candidate.fit)}
            for candidate in ([] if result.reference is None else [result.reference, *result.candidates])
        ],
        "hypotheses_compared": result.tested,
        "answers": result.answers,
        "wrong_answers": result.wrong,
        "parameter_faults": result.faults,
        "not_visible": result.not_visible,
        "requests": result.requests,
    }
