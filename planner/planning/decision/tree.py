"""The decision tree: which questions are asked in which order, answered from the walked space with the deciding bytes.

Step 1 gets one sequence in: full fine-tuning where it is asked for or needed, LoRA, then QLoRA; the first that fits is
taken (`preferred_nodes` states the rule). With several GPUs `layout_tree` then asks how the job is put on them. The
last step spends what is left: attention kernel, checkpointing, micro-batch, accumulation. The tree is not monotone
(QLoRA with the fp32 cast can need more than LoRA), so every branch is compared, none assumed.
"""

from collections.abc import Iterator, Mapping

from planner.core.errors import SetupError
from planner.core.units import gib, percent
from planner.frameworks.hyperparameters import OVERFITTING_TOKENS_PER_PARAM
from planner.memory.attention_kernels import (
    attention_refusal,
    flash_refusal,
    linear_attention_refusal,
    missing_kernels,
    padded,
)
from planner.memory.engines import why_not
from planner.memory.model import predict_memory
from planner.memory.workload import Workload
from planner.models.targets import num_lora_params
from planner.options.kernels import COMPILES_NOTHING, KERNELS, planned_kernels
from planner.options.stacks import DEFAULT, STACKS
from planner.planning.decision.layouts import layout_key
from planner.planning.decision.node import Node
from planner.planning.decision.policy import COMPILE_WORTH, compile_left_out
from planner.planning.decision.results import PREFERENCE_FRACTION, NodeResults, WalkResults
from planner.planning.expressed import variants_as_run
from planner.planning.lora_rank import BITS_PER_PARAMETER, BITS_PER_TOKEN, MAX_RANK
from planner.planning.plan import Answer, NoPlan, Plan, PrunedBranch
from planner.planning.predict import attention_kernels, device_peak_bytes
from planner.planning.refine import never_runs
from planner.planning.walk import WalkedSetup
from planner.setup import TrainSetup
from planner.setup.allowed import FLEX
from planner.setup.outcome import Candidate
from planner.setup.packages import CHUNKED_TYPES, DELTA, PACKAGED
from planner.speed import speed_profile

METHOD_BAND = 0.10
"""How far the predicted ratio of two methods' speeds errs: 90th percentile of full / LoRA over 66 measured pairs, of
QLoRA / LoRA 6 % over 54 (docs/speed-accuracy.md, "Ratios"). What is not known of a card is common to both."""

CHECKPOINTING = "Is gradient checkpointing needed?"
WITHIN_ERROR_BAND = "by less than the formula errs"
SingleGpuAnswer = Plan | NoPlan | None
"""The answer for the same work on one GPU; None where the options leave nothing to plan there."""


def answers(
    workload: Workload,
    results: WalkResults,
    node: Node | None,
    best: WalkedSetup | None,
    chosen: Candidate | None,
    alone: SingleGpuAnswer,
) -> Iterator[Answer]:
    """All answers, in the order in which the questions are asked; `node`, its `best` point and `chosen` are what was
    taken, if anything fits."""
    nodes = results.nodes()
    methods = method_answers(nodes, node, workload)
    if workload.num_gpus == 1:
        yield from methods
    else:
        from planner.planning.decision.layout_tree import layout_answers  # one GPU never needs it

        yield from layout_answers(workload, results, node, chosen, alone, methods)
    if node is not None and best is not None:
        yield class_answer(nodes, node, workload)
        mine = results.of_node(node)[layout_key(best.shared)]
        yield from activation_answers(mine, best, workload, mine.ranked())


def preferred_nodes(workload: Workload) -> tuple[Node, ...]:
    """The nodes in the order in which one that fits is taken.

    Quality first, then speed: a 16-bit base before a quantized one, which is for what does not fit. 4 bits before 8:
    smaller, and faster on every card that was measured; 8 bits only where nothing else was asked for. Full fine-tuning
    first where it is asked for or where the data is more than an adapter of the largest rank can hold, else last.
    """
    adapters = (Node.LORA, Node.FOUR_BIT, Node.EIGHT_BIT)
    full_first = workload.fixed.get("method") == ("full",) or data_needs_full(workload)
    return (Node.FULL, *adapters) if full_first else (*adapters, Node.FULL)


def data_needs_full(workload: Workload) -> bool:
    """Whether the data is more than an adapter of the largest rank can hold (rule: `planner.planning.lora_rank`)."""
    tokens = workload.data.epoch_tokens
    return tokens is not None and BITS_PER_TOKEN * tokens > BITS_PER_PARAMETER * num_lora_params(
        workload.model, workload.fixed.get("lora_targets", ("all-linear",))[0], MAX_RANK
    )


def data_too_small_for_full(workload: Workload) -> bool:
    """Whether full fine-tuning would overfit so little data, which nobody wants unasked."""
    tokens = workload.data.epoch_tokens
    return tokens is not None and tokens < OVERFITTING_TOKENS_PER_PARAM * workload.model.num_params


def choose_node(nodes: Mapping[Node, NodeResults], workload: Workload, *, from_host: bool = False) -> Node | None:
    """The node taken: the first of `preferred_nodes` with a setup that surely fits, else the first with one that may.

    Two exceptions. Full fine-tuning replaces a LoRA that fits where it fits for sure, is not slower by more than such a
    comparison errs (METHOD_BAND), and the data is not known to be too small for it. A quantized base replaces it where
    speed is preferred (`workload.prefer`) and predicted to gain more than that; with states in the host's memory
    (`from_host`) unless it loses more than that, because a quarter of the base then crosses the link.
    """
    speeds = {
        node: node_results.speed(best)
        for node, node_results in nodes.items()
        if (best := node_results.best()) is not None
    }
    sure = [node for node in speeds if nodes[node].sure]
    taken = next((node for node in preferred_nodes(workload) if node in (sure or speeds)), None)
    if taken is not Node.LORA:
        return taken
    full = nodes[Node.FULL].best_sure()
    as_fast = full is not None and nodes[Node.FULL].speed(full) >= speeds[Node.LORA] * (1 - METHOD_BAND)
    if as_fast and not data_too_small_for_full(workload):
        return Node.FULL
    if workload.prefer == "speed" or from_host:
        gain = -METHOD_BAND if from_host else METHOD_BAND
        if Node.FOUR_BIT in (sure or speeds) and speeds[Node.FOUR_BIT] > speeds[Node.LORA] * (1 + gain):
            return Node.FOUR_BIT
    return taken


def least_words(workload: Workload) -> str:
    """The smallest micro-batch that is open to a plan."""
    least = min(workload.fixed.get("micro_batch_seqs", (1,)))
    return "one sequence" if least == 1 else f"{least} sequences"


def method_answers(nodes: dict[Node, NodeResults], chosen: Node | None, workload: Workload) -> list[Answer]:
    """Step 1 as answers: one per node, in order, with the bytes of its smallest setup."""
    budget = workload.budget_bytes
    answers = []
    for node in Node:
        node_results, name = nodes[node], node.words
        if node_results.smallest is None:
            continue
        need = node_results.smallest.peak_device_bytes
        shown = None if never_runs(need, budget) else need
        cuts: tuple[PrunedBranch, ...] = ()
        if node_results.best() is None:
            choice = "no"
            reason = f"the smallest {name} setup needs {gib(need)}, {gib(need - budget)} more than the budget"
            reason = reason if shown else f"its step stops in every {name} setup that could fit"
            cuts = (PrunedBranch(name, reason, node_results.walked, shown, budget),)
        elif node == chosen:
            choice = "yes, taken" if node_results.sure else "it may, taken"
            reason = _taken(node, nodes, need, workload)
        else:
            choice = f"{node_results.fit_words}, not taken"
            reason = _not_taken(node, nodes, chosen, workload)
        reason += _cast_note(workload, node_results)
        answers.append(Answer(f"Does {name} fit with {least_words(workload)}?", choice, reason, shown, budget, cuts))
    return answers


def _taken(node: Node, nodes: Mapping[Node, NodeResults], need: int, workload: Workload) -> str:
    node_results, lora, mine = nodes[node], nodes[Node.LORA].best(), nodes[node].best()
    reason = f"{least_words(workload)}: {gib(need)} at least"
    if not node_results.sure:
        reason += f", {WITHIN_ERROR_BAND}; nothing surely fits"
    if node.quantized and lora and mine and mine.tokens_per_s > lora.tokens_per_s:
        return f"{reason}; the whole is faster than 16-bit LoRA, and speed is preferred"
    if node is Node.FULL and data_needs_full(workload):
        return f"{reason}; {workload.data.epoch_tokens:,} tokens are more than an adapter of rank {MAX_RANK} holds"
    if node is Node.FULL and lora:
        limit = percent(METHOD_BAND)
        return f"{reason}; nothing is approximated, and it is not slower than LoRA by more than {limit}"
    return reason


def class_answer(nodes: Mapping[Node, NodeResults], chosen: Node, workload: Workload) -> Answer:
    """The rule's outcome in one sentence: the class taken, why no better one, and the price of the next."""
    order, mine = (Node.FULL, Node.LORA, Node.FOUR_BIT), nodes[chosen].best()
    assert mine is not None
    why = ["asked for"] if {"method", "quantization"} & set(workload.fixed) else []
    for node in order[: order.index(chosen)] if chosen in order else ():
        node_results = nodes[node]
        if node_results.smallest is not None and node_results.best() is None:
            need = node_results.smallest.peak_device_bytes
            stops, more = never_runs(need, workload.budget_bytes), gib(need - workload.budget_bytes)
            why.append(f"{node.words} does not run" if stops else f"{node.words} needs {more} more than there is")
        elif node_results.best() is not None and not node_results.sure and node is not Node.FULL:
            why.append(f"{node.words} may fit, {WITHIN_ERROR_BAND}")
    if chosen is Node.FULL and data_needs_full(workload):
        why.append(f"{workload.data.epoch_tokens:,} tokens are more than an adapter of rank {MAX_RANK} holds")
    lora = nodes[Node.LORA].best()
    if chosen is Node.FULL and lora is not None:
        gain = mine.tokens_per_s / lora.tokens_per_s
        why.append(f"it approximates nothing and runs at {gain:.2f} times LoRA's speed")
    elif chosen is Node.LORA and nodes[Node.FULL].best() is not None:
        why.append(_full_passed_over(nodes[Node.FULL], mine, workload))
    elif chosen is Node.FOUR_BIT and lora is not None and nodes[Node.LORA].sure:
        gain = mine.tokens_per_s / lora.tokens_per_s
        why.append(f"it runs at {gain:.2f} times the speed of the LoRA that fits, and speed is preferred")
    four_bit = nodes[Node.FOUR_BIT].best() if chosen in (Node.FULL, Node.LORA) else None
    if four_bit is not None:
        why.append(f"4-bit QLoRA would run at {four_bit.tokens_per_s / mine.tokens_per_s:.2f} times the speed")
    reason = "; ".join(why) or "the only class that these options leave"
    return Answer("Which class?", chosen.words, reason)


def _full_passed_over(full: NodeResults, mine: WalkedSetup, workload: Workload) -> str:
    best, sure = full.best(), full.best_sure()
    assert best is not None
    if data_too_small_for_full(workload):
        return f"full fine-tuning fits and overfits {workload.data.epoch_tokens:,} tokens"
    shown = (sure or best).tokens_per_s / mine.tokens_per_s
    if sure is None:
        return f"full fine-tuning may fit, {WITHIN_ERROR_BAND}, and would run at {shown:.2f} times the speed"
    return f"full fine-tuning fits and runs at {shown:.2f} times the speed"


def _not_taken(node: Node, nodes: Mapping[Node, NodeResults], chosen: Node | None, workload: Workload) -> str:
    best, taken = nodes[node].best(), nodes[chosen].best() if chosen else None
    if best is None or taken is None or chosen is None:
        return "fits, but another branch was taken"
    ratio, fits = best.tokens_per_s / taken.tokens_per_s, nodes[node].fit_words
    speed = f"it would run at {ratio:.2f} times the speed"
    if node is Node.FULL:
        if data_too_small_for_full(workload):
            return f"overfits {workload.data.epoch_tokens:,} tokens; {speed} (--method full)"
        return f"{fits}, but is taken only when asked for (--method full), needed by the data, or as fast; {speed}"
    if node is Node.EIGHT_BIT:
        return f"{fits}, but 8 bits are taken only when asked for (--quantization int8); {speed}"
    if not nodes[node].sure and nodes[chosen].sure:
        return f"it may fit, {WITHIN_ERROR_BAND}; {speed}"
    if taken.shared.offload != "none" and chosen.quantized:
        return f"fits, but {chosen.words} leaves a quarter of its base in the host's memory; {speed}"
    if node is Node.LORA and chosen is Node.FULL:
        return f"full fine-tuning fits and approximates nothing; {speed} (--method lora)"
    if node is Node.LORA:
        return f"fits, but {chosen.words} is predicted {1 / ratio:.2f} times as fast, and speed is preferred"
    if node is Node.FOUR_BIT:
        return f"{chosen.words} fits and loses less; {speed} (--prefer speed, or --method qlora)"
    return f"{chosen.words} fits and is preferred; {speed}"


def _cast_note(workload: Workload, node_results: NodeResults) -> str:
    """What peft's cast would add to the smallest setup of a quantized node, where it can be had and was left out."""
    plain = node_results.smallest.setup if node_results.smallest is not None else None
    if plain is None or not plain.quantized or plain.kbit_fp32_cast or "kbit_fp32_cast" in workload.fixed:
        return ""
    try:
        cast = plain.replace(kbit_fp32_cast=True)
    except SetupError:
        return ""
    if why_not(workload.model, cast) or (workload.targets and variants_as_run(cast, workload) is None):
        return ""
    less, more = (device_peak_bytes(workload.model, workload.gpu, setup) for setup in (plain, cast))
    return f"; peft's fp32 cast of embeddings, norms and head would cost {gib(more - less)} more"


def kernels_words(workload: Workload, setup: TrainSetup) -> str:
    """What the kernel family of a setup buys against eager kernels, and what it needs: "-1.90 GiB, about 13 % faster,
    needs liger-kernel and Triton"."""
    package = KERNELS[setup.kernels].package
    needs = f"needs {package} and Triton" if package else "in Axolotl or Unsloth"
    return f"{_gain_words(workload, setup, setup.replace(kernels='eager'))}, {needs}"


def _gain_words(workload: Workload, setup: TrainSetup, plain: TrainSetup) -> str:
    """What one setup buys against another at the same micro-batch: "-1.90 GiB, about 13 % faster"."""
    model, gpu, pair = workload.model, workload.gpu, (setup.micro_batch_seqs, setup.accumulation_steps)
    mine, other = (predict_memory(model, gpu, variant).peak_device_bytes for variant in (setup, plain))
    fast, slow = (speed_profile(model, gpu, each, workload.cluster).at(*pair)[1] for each in (setup, plain))
    less, gain = other - mine, 100 * (fast / slow - 1)
    return f"{'-' if less >= 0 else '+'}{gib(abs(less))}, about {abs(gain):.0f} % {'faster' if gain >= 0 else 'slower'}"


def _compile_answer(workload: Workload, setup: TrainSetup) -> Answer:
    plain = setup.replace(compile=False, kernels="eager") if setup.compile else setup
    compiled = setup.replace_trusted(compile=True, kernels="eager")
    choice = "yes" if setup.compile else "no"
    if missing := missing_kernels(workload.model, workload.gpu, compiled):
        reason = missing
    elif not compiled.compiled:
        reason = COMPILES_NOTHING
    else:
        words = f"{_gain_words(workload, compiled, plain)} is predicted of it"
        if "compile" in workload.fixed:
            reason = f"asked for: {words}, against eager kernels"
        elif setup.compile:
            reason = f"{words}, against eager kernels; such gains are up to {percent(COMPILE_WORTH)} off"
        else:
            why = compile_left_out(workload, compiled) or f"no more than {percent(PREFERENCE_FRACTION)} over the choice"
            doubt = "no dry run or probe sees it, compiling takes minutes"
            reason = f"{words}; {why}; {doubt} (--compile plans with it)"
    return Answer("torch.compile?", choice, reason)


def _program_answer(workload: Workload, best: WalkedSetup, results: NodeResults) -> Answer:
    setup, title = best.setup, best.shared.trainer_title
    if workload.targets:
        return Answer("Which program?", title, "planned as it runs it (--target)")
    if setup.stack == DEFAULT:
        reason = f"no other that is open to a plan gains more than {percent(PREFERENCE_FRACTION)}"
        return Answer("Which program?", title, reason)
    plain = results.best_beside(lambda shared: shared.stack == DEFAULT)
    others = f"TRL would run at {plain.tokens_per_s / best.tokens_per_s:.2f} times the speed" if plain else "TRL cannot"
    return Answer("Which program?", title, f"{others} (--target trl)")


def _generator_answer(workload: Workload, best: WalkedSetup, results: NodeResults) -> Answer:
    from planner.planning.rollouts import needs_of, vllm_refusal  # late: few objectives generate

    roll = best.shared.rollout_settings
    others = results.best_beside(lambda shared: shared.rollout_settings.by_vllm != roll.by_vllm)
    if roll.colocated:
        start, whole = needs_of(workload, roll)
        share = int(roll.vllm_fraction * workload.gpu.memory_bytes)
        reason = (
            f"of its {gib(share)} weights and a forward take {gib(start)}, keys and values of all its completions at "
            f"full length {gib(whole - start)}"
        )
        if share < whole:
            reason += ": some wait for others, which is not counted"
        if others is not None:
            ratio = others.tokens_per_s / best.tokens_per_s
            reason += f"; by transformers it would run at {ratio:.2f} times the speed (--generator transformers)"
    elif roll.by_vllm:
        reason = "asked for: it needs cards of its own"
    elif refused := vllm_refusal(workload):
        reason = refused
    elif best.shared.quantized:
        reason = "TRL cannot hand a quantized base's weights to vLLM"
    elif others is not None:
        reason = f"vLLM beside it would run at {others.tokens_per_s / best.tokens_per_s:.2f} times the speed"
    else:
        reason = "no vLLM fits beside the model" if "rollout" not in workload.fixed else "asked for"
    return Answer("Who generates the completions?", roll.generator, reason)


def _kernels_answer(workload: Workload, best: WalkedSetup) -> Answer:
    first = planned_kernels(workload.targets, best.setup.objective)[0]
    setup = best.setup
    if setup.kernels != "eager":
        reason = f"{kernels_words(workload, setup)} (against eager kernels)"
    elif first == "eager":
        reason = f"{setup.trainer_title} runs no others"
    elif missing := missing_kernels(workload.model, workload.gpu, setup.replace_trusted(kernels=first)):
        reason = missing
    elif (package := PACKAGED["kernels"].get(first, "")) in workload.absent_packages:
        reason = f"{package} is not installed here"
    else:
        try:
            words = kernels_words(workload, setup.replace(kernels=first))
            reason = f"{KERNELS[first].words} would be {words}: too little for another package"
        except SetupError as error:
            reason = str(error.message)
    return Answer("Which kernels for norms, rotary embedding and MLP?", KERNELS[setup.kernels].words, reason)


def activation_answers(
    results: NodeResults, best: WalkedSetup, workload: Workload, same_node: list[WalkedSetup]
) -> list[Answer]:
    """Step 2 as answers: attention, checkpointing, micro-batch, accumulation."""
    family = best.family
    # What the chosen attention does on this card.
    if "sdpa" not in workload.model.attentions and family.attention == "eager":
        attention = "no fused kernel supports this model's attention"
        if not attention_refusal(workload.model, FLEX):
            compared = f"FlexAttention has, but no run of it was compared (--attention {FLEX})"
            attention = f"{flash_refusal(workload.model)}; {compared}"
    elif attention_kernels(workload.model, workload.gpu, family) & {"math", "eager"}:
        attention = "no fused kernel takes this on the card: tokens x tokens matrices are kept"
    else:
        attention = "fused kernels keep no tokens x tokens matrix"
        sdpa = best.setup.replace_trusted(attention="sdpa")
        if family.attention == "flash-attention-2" and workload.uneven and padded(workload.model, sdpa):
            attention += "; SDPA would be handed a mask where samples of a micro-batch differ in length"
    answers = [Answer("Which attention kernel?", family.attention, attention)]
    if "kernels" not in workload.fixed or family.kernels != "eager":
        answers.append(_kernels_answer(workload, best))
    if workload.model.model_type in CHUNKED_TYPES:
        # What computes the gated delta rule: what the package buys, or why transformers' own loop stays.
        setup = best.setup
        package = setup.replace_trusted(linear_attention="fla")
        words = _gain_words(workload, package, setup.replace_trusted(linear_attention="torch"))
        if setup.linear_attention == "fla":
            reason = f"{words}, against transformers' own loop; needs {DELTA} and Triton"
        elif not (reason := linear_attention_refusal(workload.model, workload.gpu)):
            reason = "asked for" if "linear_attention" in workload.fixed else f"{DELTA} is not installed here"
            reason += f": the package would be {words}"
        choice = DELTA if setup.linear_attention == "fla" else "transformers' own loop"
        answers.append(Answer("What computes linear attention?", choice, reason))
    answers.append(_program_answer(workload, best, results))
    if family.objective_spec.rolls_out:
        answers.append(_generator_answer(workload, best, results))
    supervised = family.objective_spec.supervised and family.images is None
    if family.num_gpus == 1 and supervised and STACKS[family.stack].runs_trainer:
        answers.append(_compile_answer(workload, best.setup))
    if (unchecked := results.smallest_unchecked) is not None:
        answers.append(_checkpointing_answer(unchecked.peak_device_bytes, best.setup, workload))
    return [*answers, _micro_batch_answer(best, workload, same_node)]


def _checkpointing_answer(need: int, setup: TrainSetup, workload: Workload) -> Answer:
    least, budget = least_words(workload), workload.budget_bytes
    if never_runs(need, budget):
        return Answer(CHECKPOINTING, "yes", "without it the step stops with an error")
    if need > budget:
        choice, reason = "yes", f"without it {least} would need {gib(need)}, {gib(need - budget)} too much"
    elif setup.checkpointing:
        choice = "yes"
        larger = setup.micro_batch_seqs > setup.objective_spec.least_samples
        but = "the larger micro-batch it allows is faster" if larger else f"with {gib(budget - need)} to spare only"
        reason = f"{least} would fit without it ({gib(need)}), but {but}"
    else:
        choice = "no"
        reason = f"without it {least} would need {gib(need)}, which fits, and nothing has to be recomputed"
    if setup.checkpointing > 1 and choice == "yes":
        choice = f"every {setup.checkpointing} layers"
    return Answer(CHECKPOINTING, choice, reason, need, budget)


def _micro_batch_answer(best: WalkedSetup, workload: Workload, same_node: list[WalkedSetup]) -> Answer:
    family, budget = best.family, workload.budget_bytes
    larger = (p for p in same_node if p.family == family and p.micro_batch_seqs > best.micro_batch_seqs)
    copies = f" x {family.data_degree} copies" if family.data_degree > 1 else ""
    if "micro_batch_seqs" in workload.fixed:
        reason = "asked for"
    elif best.accumulation_steps == 1:
        reason = "the whole global batch fits in one forward" + (" of every copy" if copies else "")
    elif any(larger):
        reason = "larger micro-batches fit but are not predicted to be faster"
        several = family.replace_trusted(micro_batch_seqs=2)
        if family.attention == "sdpa" and workload.uneven and padded(workload.model, several):
            reason += ", as SDPA is handed a mask where their samples differ in length"
    else:
        reason = f"the fastest that fits: {gib(best.peak_device_bytes)} of {gib(budget)}"
    choice = f"{best.micro_batch_seqs} x {best.accumulation_steps}{copies}"
    reason += f"; the global batch stays {workload.global_batch_seqs} sequences"
    question = "Which micro-batch, and how much accumulation?"
    return Answer(question, choice, reason, best.peak_device_bytes, budget)
