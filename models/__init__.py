"""Llama, Qwen and Mistral models on packed, sequence-sharded batches."""
