"""Reinforcement learning: the PPO stage, its rollouts, the sampler, servers and rewards."""
