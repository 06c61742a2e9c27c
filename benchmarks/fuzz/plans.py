"""Texts of plans that have, together, every field that a plan can have."""

STAGES = """\
autopar plan 1
mesh pp=2,dp=2,tp=2 order pp,tp,dp
model 5be0c1
recipe dp:zero3,tp:tp+sp,pp:1f1b
micro-batches 4
pipeline 1f1b: linear_2
recompute 1 block
precision bfloat16 reduce=float32
parameter up.weight: S(0)@tp S(1)@dp host | S(0)@tp V@dp | micro_batch by rows
parameter b: S(0.*)@dp nvme | R host | step
saved layers.*.input: S(1)@tp host
input tokens: S(0)@dp
op linear_1: b0 -
shape input tokens: 8 64 int64
shape parameter b: scalar
note(price) The axis dp splits the batch.
"""

REPLICAS = """\
autopar plan 1
mesh ps=2,dp=3,tp=2
model 5be0c1
recipe ps:diloco:10,dp:ddp,tp:tp
micro-batches 4
replicas ps: every 10 steps diloco momentum=0.9 rate=0.7
decomposed tp
overlap 2
parameter b: V@dp | V@dp S(0)@tp | step
input tokens: S(0)@dp
op linear_1: b0 j
op linear_2: b0>e^1 j
note The replicas synchronise every 10 steps.
"""

OWNERS = """\
autopar plan 1
mesh dp=3 of 2
model 5be0c1
recipe serve
micro-batches 4
recompute {"layers.*": ["mlp.act/gelu"]}
parameter b: O(0)@dp | O(0)@dp | step
input tokens: S(0)@dp
op linear_1: @0
note One place of the mesh is vacant.
"""

PLANS = {"stages": STAGES, "replicas": REPLICAS, "owners": OWNERS}
