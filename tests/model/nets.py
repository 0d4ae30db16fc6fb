"""Small networks of every family that the surrogate tests shrink."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def mlp(width=64):
    return nn.Sequential(
        nn.Linear(12, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 5)
    )


class Residual(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.Conv2d(outer, outer, 3, 1, 1),
        )
        self.n1, self.n2 = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.skip = nn.Conv2d(inner, outer, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.n2(self.two(F.relu(self.n1(self.one(x))))) + self.skip(x))


def resnet(width=32):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1),
        Residual(width, width, 1),
        Residual(width, 2 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 5),
    )


def vgg(width=32):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, 1, 1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 4, 2 * width),
        nn.ReLU(),
        nn.Linear(2 * width, 5),
    )


class Squeeze(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 2, 1), nn.Conv2d(channels // 2, channels, 1)

    def forward(self, x):
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    def __init__(self, channels):
        super().__init__()
        wide = 4 * channels
        self.body = nn.Sequential(
            nn.Conv2d(channels, wide, 1),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
            Squeeze(wide),
            nn.Conv2d(wide, channels, 1),
        )

    def forward(self, x):
        return x + self.body(x)


def mobilenet(width=32):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1),
        nn.BatchNorm2d(width),
        Inverted(width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 5),
    )


def resnext(width=32):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1),
        nn.GroupNorm(4, width),
        nn.Conv2d(width, width, 3, 1, 1, groups=4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 5),
    )


class Dense(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, width, 3, 1, 1)
        self.norm, self.c = nn.BatchNorm2d(2 * width), nn.Conv2d(2 * width, 2 * width, 1)
        self.out = nn.Linear(2 * width, 5)

    def forward(self, x):
        x = self.a(x)
        x = self.norm(torch.cat([x, self.b(x)], 1))
        return self.out(self.c(x).mean((2, 3)))


class Reader(nn.Module):
    def __init__(self, kind=nn.LSTM, width=32, both=False):
        super().__init__()
        self.words = nn.Embedding(20, width)
        self.cells = kind(width, 2 * width, 2, batch_first=True, bidirectional=both)
        self.out = nn.Linear(2 * width * (1 + both), 20)

    def forward(self, x):
        return self.out(self.cells(self.words(x))[0])


class Separate(nn.Module):
    """Attention by hand, with numbers kept as attributes and positions of which some are used."""

    def __init__(self, d=64, heads=4):
        super().__init__()
        self.d, self.heads = d, heads
        self.words, self.places = nn.Embedding(20, d), nn.Parameter(torch.randn(16, d))
        self.q, self.k, self.v, self.mix = (nn.Linear(d, d) for _ in range(4))
        self.norm = nn.LayerNorm(d)
        self.feed = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.out = nn.Linear(d, 20)

    def forward(self, x):
        x = self.words(x) + self.places[: x.shape[1]]
        b, t, _ = x.shape
        y = self.norm(x)
        q, k, v = (
            layer(y).view(b, t, self.heads, self.d // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, self.d)
        x = x + self.mix(y)
        return self.out(x + self.feed(x))


class Packed(nn.Module):
    """Queries, keys and values in one weight, and a stored scale."""

    def __init__(self, d=64, heads=4):
        super().__init__()
        self.heads, self.head_dim, self.width = heads, d // heads, d
        self.scale = self.head_dim**-0.5
        self.words, self.qkv, self.mix = nn.Embedding(20, d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm, self.out = nn.LayerNorm(d), nn.Linear(d, 20)

    def forward(self, x):
        x = self.words(x)
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).split(self.width, dim=2)
        q, k, v = (z.view(b, t, self.heads, self.head_dim).transpose(1, 2) for z in (q, k, v))
        y = (q @ k.transpose(-2, -1) * self.scale).softmax(-1) @ v
        return self.out(x + self.mix(y.transpose(1, 2).reshape(b, t, self.width)))


class Encoder(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        layer = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True)
        self.words, self.body = nn.Embedding(20, d), nn.TransformerEncoder(layer, 1)
        self.out = nn.Linear(d, 20)

    def forward(self, x):
        return self.out(self.body(self.words(x)))


class Causal(Encoder):
    """With a mask that is a buffer: as long as the text, whatever the width."""

    def __init__(self, d=64):
        super().__init__(d)
        self.register_buffer("mask", torch.ones(words().shape[1], words().shape[1]).triu(1).bool())

    def forward(self, x):
        return self.out(self.body(self.words(x), mask=self.mask))


def gpt2(width=64):
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=20, n_positions=16, n_embd=width, n_layer=1, n_head=4, resid_pdrop=0.0, **ends)
    )


def bert(width=64):
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=20,
            hidden_size=width,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=2 * width,
            max_position_embeddings=16,
            num_labels=5,
        )
    )


def vectors():
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(0))


def images():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def words():
    return torch.randint(0, 20, (2, 8), generator=torch.Generator().manual_seed(0))
