"""Operations with their backward, which read the weights of modules (models/modules.py) directly.

An operation (linear.py) is one node of the graph. It keeps little for backward, and computes again what is cheap:

    Products       x -> W x + b of several matrices           keeps x
    RMSNorm        x -> norm (models/modules.py)              keeps x
    Activation     gate, up -> act(gate) * up                 keeps gate, up
    Projection     hidden -> norm -> q, k, v -> rotate        keeps hidden              (norm again in backward)
                   where heads have norms: q and k before these, too
    SecondHalf     hidden -> norm -> feed-forward -> +        keeps hidden              (norm again)
      GatedMLP     gate, up -> down                           keeps gate, up            (activation again)
      SparseMLP    the same with experts of each row          keeps gate, up of its experts
      in tiles     keeps hidden only                        (norm, gate and up again; down where a norm follows)

In backward, `to_x` is the gradient of a value x, and `of_weight` that of a weight.

Operations refer to parameters and never keep views of them: ZeRO-3 replaces a parameter's memory between forward and
backward, and a view would keep the gathered weights alive. A module hands its weight, with its bias and adapter, to
the operations as a Matrix (linear.py).
"""
