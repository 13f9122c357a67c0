"""Operations with their backward, which read the weights of modules (models/modules.py) directly.

The nodes of this folder keep little for backward, and compute again what is cheap:

    LinearNode     x -> W x + b of several matrices           keeps x
    Projection     hidden -> norm -> q, k, v -> rotate        keeps hidden              (norm again in backward)
                   where heads have norms: q and k before these, too
    GatedMLP       hidden -> norm -> gate, up -> down -> +    keeps hidden, gate, up    (norm and activation again)
                   in tiles: keeps hidden only, backward runs norm, gate and up again, never down
    SparseMLP      the same with experts of each row          keeps hidden, gate, up of its experts

All save parameters, never views of them: ZeRO-3 replaces a parameter's memory between forward and backward, and a
view would keep the gathered weights alive. A module hands its weight, with its bias and adapter, to the nodes as a
Matrix (linear.py).
"""
