"""Operations of the network, one package each: attention/*, gated_delta, channelwise_delta, omega, conv, cross_entropy, fp8, paged, sketch, ...

Each has op.py (public, checks shapes) and, where they exist, reference.py (naive), torch_op.py (custom ops that are not in op.py), triton.py, gluon.py.
Imported by: the model, sweep/bench, sweep/doctor, sweep/attempt, sweep/probes; imports no other package of the project.
Start at attention/softmax/op.py and dispatch.py, which chooses backends.
"""
