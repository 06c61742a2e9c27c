"""Training of a small wav2vec 2.0 with a CTC loss on random sounds, in a loop as people write it, with its own loss."""

import torch
import torch.nn.functional as F
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

torch.manual_seed(0)
sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 32,
}
convolutions = {"conv_dim": (32, 32, 32), "conv_kernel": (10, 3, 3), "conv_stride": (5, 2, 2)}
places = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
off = ("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout", "layerdrop")
config = Wav2Vec2Config.from_dict(
    {**sizes, **convolutions, **places, **dict.fromkeys(off, 0.0), "apply_spec_augment": False}
)
model = Wav2Vec2ForCTC(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(5):
    sounds, letters = torch.randn(8, 1600), torch.randint(1, 32, (8, 12))
    lengths = torch.randint(4, 12, (8,))
    chances = model(sounds).logits.log_softmax(-1).transpose(0, 1)
    frames = torch.full((8,), chances.shape[0])
    loss = F.ctc_loss(chances, letters, frames, lengths, zero_infinity=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
