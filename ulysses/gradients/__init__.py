"""Gradient policies: small objects that see and change the gradient once per optimizer step. They need only torch.

chain = build_chain("default")
loss.backward()
context = StepContext(step=k, total_steps=n, loss=loss.item(), lr=lr, seed=0)
metrics = chain.apply(TorchGradients(model.named_parameters()), context)
if not context.skip: ...                      # step with lr * context.lr_scale

policy.py holds the policies that every run has; chain.py names all policies and imports their files.
"""

from ulysses.gradients.chain import GradientPolicyChain, build_chain
from ulysses.gradients.gradients import Gradients, GradientSlice, TorchGradients
from ulysses.gradients.policy import ClipGlobalNorm, GradientPolicy, StepContext

__all__ = [
    "ClipGlobalNorm",
    "GradientPolicy",
    "GradientPolicyChain",
    "GradientSlice",
    "Gradients",
    "StepContext",
    "TorchGradients",
    "build_chain",
]
