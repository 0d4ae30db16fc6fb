"""Every joule accounted for: sensors, meters, attribution, carbon and power limits."""

from penstock.energy._attribution import Attribution, Part, Usage, attribute, attribute_fused, split
from penstock.energy._carbon import EnergyBudget, Grid, co2, energy_budget, grid, money
from penstock.energy._discover import (
    Finding,
    State,
    cpu_sensors,
    default_sensors,
    examine,
    gpu_sensors,
    sensors_for,
)
from penstock.energy._estimate import EstimateSensor
from penstock.energy._guard import LimitGuard
from penstock.energy._hook import (
    PROBLEMS,
    EpochMeter,
    LimitedMeters,
    LimitOptions,
    PowerLimits,
    make_meter,
    wait_for_gpu,
)
from penstock.energy._imagined import Draw, Fleet, SimulatedGpus
from penstock.energy._limiter import FileCache, LimitReport, PowerLimiter, savings, would_have_taken
from penstock.energy._meter import Meter, Window
from penstock.energy._nvml import NvmlSensor
from penstock.energy._power_limit import (
    Applied,
    PowerLimitOptimizer,
    Profiling,
    Ready,
    Settling,
    Warming,
    limits_between,
)
from penstock.energy._profile import (
    PARTS,
    PROFILES,
    EtaCost,
    LeastEnergy,
    LeastEnergyWithin,
    LeastTime,
    LimitProfile,
    LimitRule,
    PowerProfile,
    ProfileCache,
    profile_key,
)
from penstock.energy._rapl import RaplSensor, rapl_sensors
from penstock.energy._replay import Recorder, ReplaySensor
from penstock.energy._sensor import DeviceKind, Sensor
from penstock.energy._shared import SharedSensor
from penstock.energy._simulated import V100, V100_LOADS, GpuModel, Load, SimulatedGpu

__all__ = [
    "PARTS",
    "PROBLEMS",
    "PROFILES",
    "V100",
    "V100_LOADS",
    "Applied",
    "Attribution",
    "DeviceKind",
    "Draw",
    "EnergyBudget",
    "EpochMeter",
    "EstimateSensor",
    "EtaCost",
    "FileCache",
    "Finding",
    "Fleet",
    "GpuModel",
    "Grid",
    "LeastEnergy",
    "LeastEnergyWithin",
    "LeastTime",
    "LimitGuard",
    "LimitOptions",
    "LimitProfile",
    "LimitReport",
    "LimitRule",
    "LimitedMeters",
    "Load",
    "Meter",
    "NvmlSensor",
    "Part",
    "PowerLimitOptimizer",
    "PowerLimiter",
    "PowerLimits",
    "PowerProfile",
    "ProfileCache",
    "Profiling",
    "RaplSensor",
    "Ready",
    "Recorder",
    "ReplaySensor",
    "Sensor",
    "Settling",
    "SharedSensor",
    "SimulatedGpu",
    "SimulatedGpus",
    "State",
    "Usage",
    "Warming",
    "Window",
    "attribute",
    "attribute_fused",
    "co2",
    "cpu_sensors",
    "default_sensors",
    "energy_budget",
    "examine",
    "gpu_sensors",
    "grid",
    "limits_between",
    "make_meter",
    "money",
    "profile_key",
    "rapl_sensors",
    "savings",
    "sensors_for",
    "split",
    "wait_for_gpu",
    "would_have_taken",
]
