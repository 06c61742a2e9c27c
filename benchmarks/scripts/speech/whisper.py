"""Fine-tuning of a small Whisper on random spectrograms, as people write it; a label of -100 does not count."""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

torch.manual_seed(0)
sizes = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 16, "vocab_size": 128}
layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
rest = {"max_source_positions": 50, "max_target_positions": 32, "dropout": 0.0}
config = WhisperConfig.from_dict({**sizes, **layers, **special, **rest})
model = WhisperForConditionalGeneration(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(5):
    features, labels = torch.randn(8, 16, 100), torch.randint(4, 128, (8, 20))
    for row, length in zip(labels, torch.randint(5, 20, (8,)), strict=True):
        row[length:] = -100
    loss = model(input_features=features, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
