"""What TRL, verl and OpenRLHF call the settings of a recipe, for hints only.

To add a name, write its last part into `TABLE`.
"""

TABLE = """\
n num_generations n_samples_per_prompt num_return_sequences rollout_n = \
rollout.group_size | sample.samples
max_completion_length max_response_length generate_max_len response_length max_tokens = \
rollout.max_new_tokens
max_prompt_length prompt_max_len max_length max_seq_length max_seq_len max_len cutoff_len = \
prompts.max_prompt_tokens | demonstrations.max_tokens | preferences.max_tokens
lr learning_rate actor_learning_rate actor_lr = training.optimizer.learning_rate
critic_learning_rate critic_lr = critic.optimizer.learning_rate
beta kl_coef kl_loss_coef init_kl_coef kl_coefficient = \
algorithm.kl.coefficient | loss.beta | distillation.beta
bf16 fp16 dtype torch_dtype mixed_precision = \
training.precision (float32, bfloat16 or float16) | rollout.engine.dtype
colocate colocate_all_models vllm_mode hybrid_engine = \
rollout.placement (colocated or disaggregated)
per_device_train_batch_size gradient_accumulation_steps micro_train_batch_size \
ppo_micro_batch_size_per_gpu ppo_micro_batch_size ppo_max_token_len_per_gpu = \
training.micro_batch_tokens (in tokens, packed; accumulation follows) | rollout.groups_per_step \
(prompts of a step) | samples_per_step (rows of a step)
train_batch_size rollout_batch_size batch_size global_batch_size = \
rollout.groups_per_step (prompts of a step, each with rollout.group_size samples) | \
samples_per_step (rows of a step, over all ranks)
ppo_mini_batch_size mini_batch_size num_minibatches = \
training.num_mini_batches (how many of a step, not how large)
num_train_epochs total_epochs num_episodes max_epochs = epochs
num_iterations ppo_epochs = training.epochs_per_step
max_steps total_training_steps = steps
tensor_model_parallel_size tensor_parallel_size vllm_tensor_parallel_size tp = \
rollout.engine.tensor (engines) | training.layout.tensor (trainer)
vllm_num_engines data_parallel_size = rollout.num_engines
ulysses_sequence_parallel_size ring_attn_size context_parallel_size cp = training.layout.sequence
clip_eps epsilon eps_clip cliprange clip_range clip_ratio = algorithm.clip_low | algorithm.clip_high
epsilon_low clip_ratio_low eps_clip_low = algorithm.clip_low
epsilon_high clip_ratio_high eps_clip_high = algorithm.clip_high
max_grad_norm grad_clip max_norm = training.optimizer.clip_norm
adv_estimator advantage_estimator = algorithm.advantage
entropy_coeff entropy_coef = algorithm.entropy_coefficient
lr_scheduler_type lr_scheduler = training.schedule.kind
warmup_ratio lr_warmup_ratio lr_warmup_steps lr_warmup_steps_ratio = \
training.schedule.warmup_steps (a number of steps)
model_name_or_path pretrain pretrained_model_name_or_path = model.path
dataset_name prompt_data train_files dataset = \
prompts.source | demonstrations.source | preferences.source
val_files eval_dataset = \
evaluation.prompts.source | evaluation.demonstrations.source | evaluation.preferences.source
output_dir default_local_dir save_path = folder
save_steps save_freq = training.checkpoint.every (steps)
save_total_limit max_ckpt_num = training.checkpoint.keep
eval_steps test_freq = evaluation.every (steps)
lora_rank lora_r = training.lora.rank
report_to = observe.wandb_project | observe.mlflow_experiment | observe.trackio_project | \
observe.tensorboard
reward_funcs remote_rm_url reward_model_path = \
environment.verifier | environment.rewards | reward_models
mask_truncated_completions overlong_filter overlong_filtering filter_overlong mask_truncated = \
algorithm.truncated ('leave_out')
overlong_buffer overlong_buffer_cfg soft_max_length soft_punish_cache = environment.overlong
loss_type = algorithm.aggregation ('sequence', 'token' or 'constant') | algorithm.loss | loss.method
loss_agg_mode = algorithm.aggregation
filter_groups dynamic_filtering = rollout.dynamic_sampling
enforce_eager = rollout.engine.compile (false, where it is true)
free_cache_engine vllm_enable_sleep vllm_enable_sleep_mode = \
rollout.placement (colocated: engines sleep while ranks train)
max_num_seqs = rollout.engine.max_num_sequences
gpu_memory_utilization vllm_gpu_memory_utilization = rollout.engine.gpu_memory_utilization
optimizer_offload adam_offload = training.offload_optimizer
enable_gradient_checkpointing gradient_checkpointing = training.gradient_checkpointing
tis_imp_ratio_cap = algorithm.correction.high
reward_weights = environment.rewards
filter_overlong_prompts = prompts.too_long (drop)
apply_chat_template = \
prompts.template ('chat') | demonstrations.template ('chat') | preferences.template ('chat')
chat_template_kwargs apply_chat_template_kwargs enable_thinking = \
prompts.template_variables | demonstrations.template_variables | preferences.template_variables
"""
"""Lines of: their names = our dotted keys, each with what is different."""
NAMES = {
    name: tuple(ours.split(" | "))
    for theirs, _, ours in (line.partition(" = ") for line in TABLE.splitlines())
    for name in theirs.split()
}
"""{their name, in lower case: our dotted keys}; a hint names those that the command has."""
