//! What other tools call our fields: the hint for who writes `batch_size` or `n_layer` out of habit. Nothing
//! is read under these names, so a run file says each thing in one way.

/// Our fields with the names that they have elsewhere: in PyTorch, transformers, Megatron, nanoGPT,
/// Lightning, DeepSpeed. A name may stand in several rows: the first whose field exists where it was written
/// is meant. Fields come first, then sections.
const NAMES: &str = "
    seed                       random_seed manual_seed rng_seed random_state
    model.name                 model_type arch architecture model_name model_name_or_path
    model.width                hidden_size d_model n_embd dim embed_dim embedding_dim hidden_dim model_dim
    model.hidden               hidden_size hidden_sizes hidden_dim hidden_dims hidden_layers widths
    model.layers               n_layer n_layers num_layers num_hidden_layers depth blocks
    model.heads                n_head n_heads num_heads num_attention_heads
    model.kv_heads             num_key_value_heads n_kv_heads num_kv_heads n_kv_head
    model.head_dim             head_size d_head
    model.inner                n_inner intermediate_size ffn_dim d_ff ffn_hidden_size
    model.eps                  rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps
    model.rotary_base          rope_theta rope_base rotary_emb_base
    model.rotary_scaling       rope_scaling rope_type
    model.window               sliding_window window_size
    model.qkv_bias             attention_bias
    model.context              block_size seq_len seq_length sequence_length max_seq_len max_seq_length
    model.context              max_length max_position_embeddings n_positions n_ctx context_length
    model.context              context_size
    model.vocab                vocab_size n_vocab vocabulary
    model.classes              num_classes n_classes num_labels
    model.tied                 tie_word_embeddings tie_embeddings tied_embeddings weight_tying
    model.activation           activation_function hidden_act act_fn nonlinearity
    model.dropout              dropout_rate resid_pdrop embd_pdrop p_dropout
    model.norm                 norm_type normalization normalisation
    data.size                  image_size img_size crop_size train_crop_size val_crop_size resolution
    data.resize                resize_size val_resize_size shortest_edge
    data.flip                  hflip hflip_prob horizontal_flip random_flip
    data.padding               pad crop_padding
    data.path                  dataset data_path data_dir dataset_path dataset_name train_file train_data
    data.path                  corpus file folder
    data.validation            val_split validation_split val_fraction val_ratio test_size
    data.validation_path       val_file validation_file val_data eval_data test_file
    data.tokenizer             tokenizer_name tokenizer_path tokenizer_file
    train.batch                batch_size batchsize bs global_batch_size train_batch_size
    train.batch                per_device_train_batch_size
    train.micro_batches        gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps
    train.micro_batches        accumulate_grad_batches micro_batch_size microbatches
    train.steps                max_steps num_steps n_steps total_steps num_train_steps max_iters
    train.steps                num_iterations iterations iters train_iters
    train.epochs               epoch num_epochs n_epochs max_epochs num_train_epochs
    train.precision            dtype torch_dtype mixed_precision fp16 bf16 fp32 amp half param_dtype
    train.clip                 grad_clip gradient_clip gradient_clipping gradient_clip_val clip_grad
    train.clip                 clip_grad_norm clip_norm max_grad_norm max_norm
    train.recompute            gradient_checkpointing activation_checkpointing grad_checkpoint
    train.recompute            recompute_activations
    train.eval_every           eval_interval eval_steps eval_freq val_interval val_check_interval
    train.eval_samples         eval_iters eval_size
    train.eval_batch           eval_batch_size val_batch_size per_device_eval_batch_size
    train.log_every            log_interval logging_steps log_freq log_every_n_steps
    optimizer.name             optim optimizer_type optimizer_name
    optimizer.beta1            adam_beta1 betas b1
    optimizer.beta2            adam_beta2 b2
    optimizer.eps              epsilon adam_epsilon adam_eps
    optimizer.weight_decay     wd l2 decay weight_decay_rate
    learning_rate.peak         lr learning_rate learningrate max_lr base_lr peak_lr init_lr rate
    learning_rate.end_factor   min_lr min_lr_ratio final_lr eta_min min_learning_rate
    learning_rate.warmup       warmup_steps num_warmup_steps warmup_iters lr_warmup_steps
    learning_rate.schedule     lr_scheduler lr_scheduler_type lr_schedule scheduler lr_decay_style decay_lr
    learning_rate.decay_steps  lr_decay_iters lr_decay_steps decay_iters
    learning_rate.step_factor  gamma lr_gamma
    learning_rate.step_every   step_size lr_step_size milestones
    prune.method               pruning_method pruner pruning_type
    prune.sparsity             amount pruning_ratio prune_ratio target_sparsity final_sparsity
    parallel.data              ranks gpus num_gpus n_gpus devices world_size dp dp_size data_parallel
    parallel.data              data_parallel_size nproc_per_node replicas
    parallel.tensor            tp tp_size tensor_parallel tensor_parallel_size model_parallel_size
    parallel.tensor            tensor_model_parallel_size
    parallel.pipeline          pp pp_size stages pipeline_parallel pipeline_parallel_size
    parallel.pipeline          pipeline_model_parallel_size
    parallel.sequence          sp sequence_parallel
    parallel.zero              zero_stage zero_optimization fsdp distributed_optimizer
    checkpoint.every           save_steps save_interval save_every checkpoint_every ckpt_interval
    checkpoint.keep            save_total_limit keep_last max_checkpoints save_top_k
    sample.tokens              max_new_tokens max_tokens num_tokens
    device.kind                accelerator device_type
    device.threads             num_threads n_threads num_workers nthreads
    data                       datasets dataloader
    train                      training trainer training_arguments
    learning_rate              scheduler lr_scheduler
    prune                      pruning sparsity_config
    parallel                   parallelism distributed mesh
    checkpoint                 checkpointing saving
    sample                     generation sampling generate
";

/// The rows: our name, and theirs.
fn rows() -> impl Iterator<Item = (&'static str, Vec<&'static str>)> {
    NAMES.lines().map(str::split_whitespace).filter_map(|mut words| Some((words.next()?, words.collect())))
}

/// Our fields, by their full paths, that other tools call so.
pub(super) fn ours(name: &str) -> impl Iterator<Item = &'static str> {
    let name = name.to_lowercase().replace('-', "_");
    rows().filter(move |(_, theirs)| theirs.contains(&&*name)).map(|(ours, _)| ours)
}

/// Our word for a value that other tools spell otherwise, where it is one of `words`.
pub(super) fn our_word(theirs: &str, words: &[&'static str]) -> Option<&'static str> {
    let ours = match theirs.to_lowercase().as_str() {
        "gpu" | "gpus" | "nvidia" => "cuda",
        "bfloat16" | "bf16-mixed" | "fp16" | "float16" | "half" | "16" | "amp" => "bf16",
        "float32" | "fp32" | "float" | "32" | "full" => "f32",
        "uint16" => "u16",
        "uint32" | "int32" => "u32",
        "full_shard" | "checkpoint" => "block",
        _ => return None,
    };
    words.iter().copied().find(|word| *word == ours)
}

#[cfg(test)]
mod tests {
    use super::super::fields::ALL;
    use super::*;

    /// A hint that leads nowhere would be worse than none.
    #[test]
    fn hints_are_fields_and_names_are_none_of_their_section() {
        for (ours, theirs) in rows() {
            let (section, field) = ours.split_once('.').unwrap_or(("", ours));
            let (_, fields) = ALL.iter().find(|(name, _)| *name == section).unwrap();
            let is_section = ALL.iter().any(|(name, _)| *name == ours);
            assert!(fields.iter().any(|known| known.name == field) || is_section, "{ours}");
            for name in theirs {
                let is_field = fields.iter().any(|known| known.name == name);
                assert!(!is_field, "{name} is a field of [{section}] itself");
            }
        }
    }
}
