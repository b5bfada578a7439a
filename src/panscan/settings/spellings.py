"""Names of options that panscan does not show: other names of one option, other tools' options, removed options."""

from __future__ import annotations

SAME_OPTION: dict[str, tuple[str, ...]] = {
    "max-new-tokens": ("max_tokens", "output_tokens"),
    "num-prompts": ("num_samples", "limit"),
    "force": ("overwrite",),
    "timeout": ("request_timeout",),
}
"""Flag -> other names that every command with this option accepts."""

FOREIGN_VALUES: dict[str, dict[str, str]] = {
    "dtype": {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "model": {size: f"google/gemma-3-{size}-it" for size in ("270m", "1b", "4b", "12b", "27b")},
    "attention": {"paged|eager": "eager", "paged|sdpa": "sdpa"},
}
"""Values of a setting that others spell differently, as vLLM's ``--dtype half``, and short names of models."""

_MEMORY = "use --kv-cache-gb or --gpu-memory-utilization to limit memory"
_CPU_OFFLOAD = "use --runner generate with --device-map auto to spread layers to the CPU"
_CROPS = "use --pan-and-scan, --min-crop-size, --max-num-crops and --min-ratio-to-activate"

FOREIGN_OPTIONS: dict[str, str] = {
    # vLLM and SGLang
    "max_model_len": f"panscan reserves no memory for a maximum length; {_MEMORY}",
    "context_length": f"panscan reserves no memory for a maximum length; {_MEMORY}",
    "max_seq_len": f"panscan reserves no memory for a maximum length; {_MEMORY}",
    "max_num_batched_tokens": "use --prefill-chunk-size for the prompt tokens per pass",
    "chunked_prefill_size": "use --prefill-chunk-size for the prompt tokens per pass",
    "enable_chunked_prefill": "the engine always splits long prompts; --prefill-chunk-size sets the tokens per pass",
    "mem_fraction_static": "use --gpu-memory-utilization",
    "tp_size": "use --tensor-parallel-size",
    "pipeline_parallel_size": "pipeline parallelism is not supported; use --tensor-parallel-size",
    "pp": "pipeline parallelism is not supported; use --tensor-parallel-size",
    "data_parallel_size": "use --replicas of bench, batch and serve",
    "dp": "use --replicas of bench, batch and serve",
    "enforce_eager": "CUDA graphs cannot be disabled in the engine; use --runner generate",
    "trust_remote_code": "panscan runs no code from checkpoints; leave it out",
    "limit_mm_per_prompt": "the images per prompt are not limited; serve has --max-images",
    "mm_processor_kwargs": _CROPS,
    "processor_kwargs": _CROPS,
    "swap_space": _CPU_OFFLOAD,
    "cpu_offload_gb": _CPU_OFFLOAD,
    "block_size": "the engine chooses the KV cache block size; leave it out",
    "load_format": "the format is read from the checkpoint; leave it out",
    "tokenizer": "the tokenizer is read from --model; leave it out",
    "tokenizer_mode": "the tokenizer is read from --model; leave it out",
    "chat_template": "Gemma 3's chat template is built in; use --raw-prompt to skip it",
    "download_dir": "set the environment variable HF_HOME",
    "cache_dir": "set the environment variable HF_HOME",
    "hf_token": "run 'hf auth login', or set the environment variable HF_TOKEN",
    "token": "run 'hf auth login', or set the environment variable HF_TOKEN",
    "attention_config": "use --attention-backend",
    "guided_json": "use --json-schema FILE",
    "guided_regex": "use --regex",
    "guided_choice": "use --choice, once for each answer",
    "guided_grammar": "use --grammar FILE",
    "compilation_config": "the engine chooses CUDA graphs; use --compile with --runner generate",
    "speculative_config": "speculative decoding is not supported; leave it out",
    "disable_log_requests": "requests are not logged; leave it out",
    "disable_log_stats": "leave it out; GET /metrics has the figures of a server",
    "request_rate": "use 'panscan load' to send requests at a rate",
    "concurrency": "use --max-concurrency",
    "seed": "use --sampling-seed",
    # removed
    **dict.fromkeys(
        ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"), "removed; use --trace with growing rates"
    ),
    "level_seconds": "removed; --find-max-rate takes the time from the limits of --goodput",
    "order": "removed; answers are written as they finish, and sorted when the job ends",
    "tf32": "removed; float32 products are computed in float32; use --dtype bf16 for speed",
    "tp_plan": "removed; use --tensor-parallel-size with the engine",
    "pad_to_multiple_of": "removed; --cache static and --compile work without it",
    # Transformers
    "do_sample": "use --temperature above 0 to sample",
    "max_length": "use --max-new-tokens, which excludes the prompt",
    "min_new_tokens": "use --ignore-eos for answers of exactly --max-new-tokens tokens",
    "num_beams": "beam search is not supported; leave it out",
    "per_device_eval_batch_size": "use --max-num-seqs, or --batch-size with --runner generate",
    "use_cache": "the KV cache cannot be disabled; leave it out",
    "cache_implementation": "use --cache static or dynamic, with --runner generate",
    "max_batch_tokens": "use --prefill-chunk-size for the prompt tokens per pass, and --kv-cache-gb for memory",
    "use_cuda_graph": "the engine always uses CUDA graphs on NVIDIA GPUs; use --compile with --runner generate",
    "disable_compile": "generate() is compiled only with --compile; leave it out",
    "fullgraph": "panscan chooses how --compile captures graphs; leave it out",
    "padding_side": "prompts are padded on the left, as decoding needs; leave it out",
    "quantization_config": "use --quantization; a quantised checkpoint's own configuration is read from --model",
    "group_size": "use --quantization-group-size",
    "low_cpu_mem_usage": "checkpoints are always loaded without a second copy; leave it out",
    "max_image_size": _CROPS,
    "load_in_4bit": "use --quantization bnb-4bit",
    "load_in_8bit": "use --quantization bnb-8bit",
    "bf16": "use --dtype bf16",
    "fp16": "use --dtype fp16",
    "greedy": "use --temperature 0",
    "again": "use --force",
    # other spellings
    "image": "give images as plain arguments, such as page.png",
    "gpus": "use --tensor-parallel-size, or --replicas of bench, batch and serve",
    "num_gpus": "use --tensor-parallel-size, or --replicas of bench, batch and serve",
    "n_gpu_layers": _CPU_OFFLOAD,
    "quantize": "use --quantization",
    "quantize_lm_head": "use --quantize-head int8",
    "quantize_vision_tower": "use --quantize-vision int8 or fp8",
    "question": "use -p",
    "verbose": "use --debug for tracebacks",
}
"""Options without an equivalent of the same meaning, and removed ones, with what to do instead. A command's own options
come first."""
