"""HyperPower's two problems on a simulated GPU: CNNs of section 4 with 6 and 13 hyperparameters.

What is simulated, and how it is meant to be hard. *Power*: every layer runs for ``max(compute, memory traffic)`` plus a
launch gap; small layers leave the device underused, 3x3 kernels have a faster algorithm; watts follow the
utilisation with less than its first power. *Memory*: weights, the two largest neighbouring activations, a
workspace, in blocks of 2 MiB, over a context. Both are measured with noise. *Test error*: diminishing returns of
each layer's size, best kernel and pool sizes, a narrow optimum of the effective learning rate lr / (1 - momentum)
that depends on the weight decay, noise, and divergence at large rates. *Time*: an epoch costs three forward passes
over the training set. Nothing here is linear in the hyperparameters, and nothing in Penstock knows these formulas.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.space import Float, Int, Space

BATCH = 128
CHANCE_ERROR = 90.0


@dataclass(frozen=True)
class Device:
    name: str
    idle_w: float
    tdp_w: float
    flops_per_s: float
    bytes_per_s: float
    saturation: float  # operations a layer needs to fill the device
    context_bytes: float
    launch_s: float


GTX_1070 = Device("Simulated GTX 1070", 38.0, 150.0, 6.0e12, 220e9, 6e8, 420e6, 12e-6)
TEGRA_TX1 = Device("Simulated Tegra TX1", 3.2, 15.0, 0.45e12, 22e9, 8e7, 250e6, 40e-6)


@dataclass(frozen=True)
class Layer:
    flops: float
    traffic: float
    weights: float
    output: float
    kernel: int


class Problem:
    """One dataset on one device."""

    def __init__(self, dataset: str, device: Device = GTX_1070, *, noise: bool = True) -> None:
        self.dataset, self.device, self.noise = dataset, device, noise
        rates: dict[str, Any] = {
            "lr": Float(0.001, 0.1, log=True),
            "momentum": Float(0.8, 0.95),
        }
        features = {"structural": True}
        if dataset == "mnist":
            self.size, self.channels, self.samples, self.epochs = 28, 1, 60_000, 30
            self.space = Space(
                conv1_features=Int(20, 80, **features),
                conv1_kernel=Int(2, 5, **features),
                conv2_features=Int(20, 80, **features),
                fc_units=Int(200, 700, **features),
                **rates,
            )
        else:
            self.size, self.channels, self.samples, self.epochs = 32, 3, 50_000, 60
            parts: dict[str, Any] = {}
            for i in (1, 2, 3):
                parts[f"conv{i}_features"] = Int(20, 80, **features)
                parts[f"conv{i}_kernel"] = Int(2, 5, **features)
                parts[f"pool{i}_kernel"] = Int(1, 3, **features)
            self.space = Space(
                **parts,
                fc_units=Int(200, 700, **features),
                **rates,
                weight_decay=Float(0.0001, 0.01, log=True),
            )

    @cached_property
    def epoch_scale(self) -> float:
        return 3.0 * self.samples / BATCH

    # --- the network ----------------------------------------------------------------------------------------

    def layers(self, c: dict[str, Any]) -> list[Layer]:
        size, channels = self.size, self.channels
        layers = []
        convolutions = 2 if self.dataset == "mnist" else 3
        for i in range(1, convolutions + 1):
            features, kernel = c[f"conv{i}_features"], c.get(f"conv{i}_kernel", 5)
            pool = c.get(f"pool{i}_kernel", 2)
            weights = features * channels * kernel**2
            output = BATCH * features * size**2
            traffic = 4.0 * (weights + output + BATCH * channels * size**2)
            layers.append(Layer(2.0 * BATCH * weights * size**2, traffic, weights, output, kernel))
            smaller = max(1, math.ceil(size / pool)) if i < 3 or pool > 1 else size
            pooled = BATCH * features * smaller**2
            layers.append(Layer(float(output * 2), 4.0 * (output + pooled), 0.0, pooled, 1))
            size, channels = smaller, features
        inputs = channels * size**2
        for outputs in (c["fc_units"], 10):
            weights = inputs * outputs
            layers.append(
                Layer(
                    2.0 * BATCH * weights,
                    4.0 * (weights + BATCH * (inputs + outputs)),
                    weights,
                    BATCH * outputs,
                    0,
                )
            )
            inputs = outputs
        return layers

    def _run(self, c: dict[str, Any]) -> tuple[float, float]:
        """Seconds and joules of a forward pass of one batch."""
        d = self.device
        time_s = energy_j = 0.0
        for layer in self.layers(c):
            fill = 1.0 - math.exp(-layer.flops / d.saturation)
            speed = {3: 1.5, 5: 1.05, 4: 0.85, 2: 0.7}.get(layer.kernel, 0.9)
            compute_s = layer.flops / (d.flops_per_s * max(fill, 0.03) * speed * 0.6)
            traffic_s = layer.traffic / d.bytes_per_s
            busy_s = max(compute_s, traffic_s)
            used = (0.65 * (compute_s / busy_s) * fill**0.7 + 0.35 * traffic_s / busy_s) ** 0.85
            energy_j += busy_s * (d.idle_w + (d.tdp_w - d.idle_w) * used) + d.launch_s * d.idle_w * 1.15
            time_s += busy_s + d.launch_s
        return time_s, energy_j

    def power_w(self, c: dict[str, Any]) -> float:
        time_s, energy_j = self._run(c)
        return energy_j / time_s

    def latency_s(self, c: dict[str, Any]) -> float:
        return self._run(c)[0]

    def memory_bytes(self, c: dict[str, Any]) -> float:
        layers = self.layers(c)
        outputs = [BATCH * self.channels * self.size**2, *(layer.output for layer in layers)]
        live = max(a + b for a, b in itertools.pairwise(outputs))
        columns = [
            layer.kernel**2 * before
            for layer, before in zip(layers, outputs, strict=False)
            if layer.kernel > 1
        ]
        # Caffe keeps every blob, and an im2col workspace per convolution.
        raw = 4.0 * (sum(outputs) + sum(layer.weights for layer in layers) + live + 0.5 * max(columns))
        block = 2.0**21
        return self.device.context_bytes + block * math.ceil(raw / block)

    def params(self, c: dict[str, Any]) -> float:
        return sum(layer.weights for layer in self.layers(c))

    def flops(self, c: dict[str, Any]) -> float:
        return sum(layer.flops for layer in self.layers(c))

    def measure(self, c: dict[str, Any], seed: int = 0) -> dict[str, float]:
        """What sensors would show: 2% noise of power, 1% of memory (the allocator), 3% of the latency."""
        draw = self._random(c, seed, "sensor")
        return {
            "power_w": self.power_w(c) * (1 + 0.02 * draw.gauss(0, 1)),
            "memory_bytes": self.memory_bytes(c) * (1 + 0.01 * draw.gauss(0, 1)),
            "latency_s": self.latency_s(c) * (1 + 0.03 * draw.gauss(0, 1)),
        }

    # --- its training ---------------------------------------------------------------------------------------

    def diverges(self, c: dict[str, Any]) -> bool:
        rate = math.log10(c["lr"] / (1 - c["momentum"]))
        depth = 0.0 if self.dataset == "mnist" else 0.25
        return rate > 0.05 - depth - 0.15 * math.log2(c["fc_units"] / 200) / 2

    def error(self, c: dict[str, Any], seed: int = 0) -> float:
        """Test error in per cent after a whole training."""
        if self.diverges(c):
            return CHANCE_ERROR
        rate = math.log10(c["lr"] / (1 - c["momentum"]))
        if self.dataset == "mnist":
            off = rate - (-0.75 + 0.1 * (c["conv1_features"] - 50) / 30)
            value = 0.72 + 0.35 * off**2 + 0.08 * abs(off)
            value += (
                0.9 / (c["conv1_features"] / 20) ** 1.3 * 0.25
                + 0.9 / (c["conv2_features"] / 20) ** 1.1 * 0.35
            )
            value += 0.12 * (c["conv1_kernel"] - 4) ** 2 / 4 + 0.22 / (c["fc_units"] / 200)
            scatter = 0.015
        else:
            decay = math.log10(c["weight_decay"])
            off = rate - (-0.95 - 0.15 * (decay + 3))
            value = 17.6 + 2.6 * off**2 + 0.9 * abs(off) + 0.8 * (decay + 3.1) ** 2
            for i, gain in ((1, 1.6), (2, 2.2), (3, 2.0)):
                value += gain / (c[f"conv{i}_features"] / 20) ** 0.9
                value += (0.5, 0.35, 0.3)[i - 1] * (c[f"conv{i}_kernel"] - (4.2, 3.4, 3.0)[i - 1]) ** 2
                value += (0.7, 0.9, 0.5)[i - 1] * (c[f"pool{i}_kernel"] - (1.8, 2.0, 2.2)[i - 1]) ** 2
            value += 1.0 / (c["fc_units"] / 200) + 0.4 * ((c["fc_units"] - 450) / 250) ** 2
            scatter = 0.15
        if self.noise:
            value += scatter * self._random(c, seed, "error").gauss(0, 1)
        return min(CHANCE_ERROR, max(0.1, value))

    def curve(self, c: dict[str, Any], seed: int = 0) -> list[float]:
        """Test error after every epoch."""
        final = self.error(c, seed)
        draw = self._random(c, seed, "curve")
        if final >= CHANCE_ERROR:
            return [CHANCE_ERROR + draw.uniform(-0.4, 0.4) for _ in range(self.epochs)]
        rate = math.log10(c["lr"] / (1 - c["momentum"]))
        slow = self.epochs * min(0.35, 0.05 + 0.06 * max(0.0, -0.9 - rate))
        return [
            final + (CHANCE_ERROR - final) * math.exp(-((e / slow) ** 0.8)) + draw.gauss(0, 0.004 * final)
            for e in range(1, self.epochs + 1)
        ]

    def epoch_s(self, c: dict[str, Any]) -> float:
        return self.epoch_scale * self.latency_s(c) + 4.0  # and reading the data

    def _random(self, c: dict[str, Any], seed: int, salt: str) -> random.Random:
        text = f"{self.dataset}{sorted(c.items())}{seed}{salt}"
        return random.Random(hashlib.blake2b(text.encode()).digest())

    # --- limits ---------------------------------------------------------------------------------------------

    def quantile(self, name: str, share: float, count: int = 2000) -> float:
        """The limit of a quantity that ``share`` of random configurations keep."""
        of = getattr(self, name)
        values = sorted(of(self.space.sample(100_000 + i)) for i in range(count))
        return values[int(share * count)]
