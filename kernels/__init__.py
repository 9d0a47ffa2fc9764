"""Operations of the network, a package each: attention/*, gated_delta, omega, conv, cross_entropy, fp8, paged and more.

A package holds op.py (the public functions, which check shapes) and, where they exist, reference.py (naive formula),
torch_op.py (custom ops that are not in op.py), triton.py and gluon.py.
Imported by: the model, sweep/bench, sweep/doctor, sweep/attempt, sweep/probes; imports no other package of the project.
Start at attention/softmax/op.py and dispatch.py, which chooses backends.
"""
