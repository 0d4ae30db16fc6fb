"""Every joule accounted for: sensors, meters, attribution, carbon and power limits."""

from penstock.energy._attribution import Attribution, Part, Usage, attribute, attribute_fused, split
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
from penstock.energy._meter import EpochMeter, Meter, Window
from penstock.energy._nvml import NvmlSensor
from penstock.energy._rapl import RaplSensor, rapl_sensors
from penstock.energy._sensor import DeviceKind, Sensor
from penstock.energy._shared import SharedSensor

__all__ = [
    "Attribution",
    "DeviceKind",
    "EpochMeter",
    "EstimateSensor",
    "Finding",
    "Meter",
    "NvmlSensor",
    "Part",
    "RaplSensor",
    "Sensor",
    "SharedSensor",
    "State",
    "Usage",
    "Window",
    "attribute",
    "attribute_fused",
    "cpu_sensors",
    "default_sensors",
    "examine",
    "gpu_sensors",
    "rapl_sensors",
    "sensors_for",
    "split",
]
