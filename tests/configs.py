"""Provides the config that tests begin with, where the presets do not matter.

An idea may change any preset, and these tests must then still hold. So this one has the cpu preset's numbers
of the time when they were written, by name; LAYERS and PARAMS are the script's.
"""

from dataclasses import replace

import train_gpt as tg

SETTINGS = """
vocab_size=257 padded_vocab=264 bos_id=256 val_slice_tokens=4096 val_slices=128 val_every=250
heads=2 head_dim=32 mlp_dim=256 mudd_dim=64 mix_groups=4 window_unit=16 sign_rows=8192 bigram_vocab_size=16384
ngrams.orders=2,3,4,5,6 ngrams.rows_per_order=65536 ngrams.width=64 ngrams.dtype=float32
ngrams.contexts= ngrams.update_every=1,1 ngrams.lr=0.56 ngrams.beta2=0.95 ngrams.wd=0.025
layers.*.xsa=false pointer_dim=0 pointer_window=2560 pointer_val_window=16384
softcap.scale=30 softcap.shift=0 softcap.span=7.5 attn_scale=0.25 narrow_attn_scale=0.4 attention_cap=0
val_windows.short=6 val_windows.long=20
cooldown_frac=0.4 momentum_min=0.85 momentum_max=0.93 momentum_warmup=90 momentum_cooldown=16 microbatches=2
late_updates_from=58 adam_lr=0.008 adam_eps=1e-10 adam_wd=0.005
bank_lr=0.023 bank_wd=2.25 bank_beta2=0.9 bank_margin=1.06 slow_rate=0.02 two_momenta_from=90
fast_beta=0.85 fast_weight=0.4385 head_chunk=8192
""".split()
STAGES = (
    tg.Stage(43, 2048, 256, tg.Windows(3, 9), 1.00),
    tg.Stage(72, 4096, 512, tg.Windows(4, 10), 1.52),
    tg.Stage(69, 4096, 512, tg.Windows(5, 11), 1.73),
    tg.Stage(16, 4096, 512, tg.Windows(6, 13), 1.00),
)
AVERAGED = "qk_bank", "narrow_qk_bank", "vo_bank", "mlp_bank", "value_embeds"
AVERAGES = (tg.WeightAverage(AVERAGED, 75, 2 / 38, 0.5),)
BASE = tg.with_settings(replace(tg.CPU, stages=STAGES, averages=AVERAGES), SETTINGS)
