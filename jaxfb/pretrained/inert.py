"""Keys of config.json that do not change what a model computes. Any other key is understood or refused."""

_MODEL = """
    _name_or_path architectures attn_implementation _attn_implementation auto_map custom_pipelines dtype model_type
    torch_dtype transformers_version vocab_size max_position_embeddings initializer_range pretraining_tp use_cache
    unsloth_fixed unsloth_version cache_implementation tie_word_embeddings cross_attention_hidden_size is_decoder
    add_cross_attention num_labels finetuning_task max_sequence_length seq_length model_max_length
    use_flash_attention_2 _flash_attn_2_enabled kv_cache_scheme initial_context_length
"""
_DROPOUT = """
    attention_dropout attention_probs_dropout_prob hidden_dropout hidden_dropout_prob resid_pdrop embd_pdrop
    resid_dropout embedding_dropout dropout classifier_dropout mlp_dropout residual_dropout embd_dropout
"""
_OUTPUT = """
    chunk_size_feed_forward id2label label2id is_encoder_decoder output_attentions output_hidden_states problem_type
    return_dict torchscript use_bfloat16 tf_legacy_loss pruned_heads task_specific_params tokenizer_class prefix
    sep_token_id bos_token_id eos_token_id pad_token_id decoder_start_token_id image_token_index
"""
_GENERATION = """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p max_new_tokens
"""
_LOSS = "output_router_logits router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux ep_size"

INERT = frozenset(f"{_MODEL} {_DROPOUT} {_OUTPUT} {_GENERATION} {_LOSS}".split())
