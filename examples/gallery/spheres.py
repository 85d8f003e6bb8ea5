"""Structs: a camera by value, and a scene as an array of structs in a tensor of bytes. Spheres are drawn."""

from contextlib import nullcontext

import numpy as np
import torch

import cupyops

CODE = r"""
struct Camera { float3 at; float zoom; int width, height; };
struct Sphere { float3 centre; float radius; };

// Thread (x, y) owns a pixel: how bright the nearest sphere is there that its ray meets, 0 where it meets none.
__global__ void draw(const Sphere* scene, int count, Camera camera, float* image) {
  const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x >= camera.width || y >= camera.height) return;
  const float u = (x + 0.5f - camera.width / 2.0f) / camera.height / 2;
  const float v = (camera.height / 2.0f - y - 0.5f) / camera.height;
  const float scale = rsqrtf(u * u + v * v + camera.zoom * camera.zoom);
  const float dx = u * scale, dy = v * scale, dz = camera.zoom * scale;
  float nearest = 1e30f, light = 0;
  for (int k = 0; k < count; ++k) {
    const Sphere s = scene[k];
    const float cx = s.centre.x - camera.at.x, cy = s.centre.y - camera.at.y, cz = s.centre.z - camera.at.z;
    const float along = cx * dx + cy * dy + cz * dz;
    const float inside = s.radius * s.radius - (cx * cx + cy * cy + cz * cz - along * along);
    if (inside < 0) continue;
    const float t = along - sqrtf(inside);
    if (t <= 0 || t >= nearest) continue;
    nearest = t;
    const float nx = (t * dx - cx) / s.radius, ny = (t * dy - cy) / s.radius, nz = (t * dz - cz) / s.radius;
    light = fmaxf(0.15f, -0.5f * nx + 0.6f * ny - 0.62f * nz);
  }
  image[y * camera.width + x] = light;
}
"""
draw = cupyops.Kernel(CODE, "draw")
FLOAT3 = np.dtype((np.float32, 3))
CAMERA = np.dtype([("at", FLOAT3), ("zoom", np.float32), ("width", np.int32), ("height", np.int32)], align=True)
SPHERE = np.dtype([("centre", FLOAT3), ("radius", np.float32)], align=True)


def render(
    spheres: list[tuple[tuple[float, float, float], float]], width: int, height: int, device: str
) -> torch.Tensor:
    """An image (height, width) of spheres, each of a centre and a radius, as seen along z."""
    scene = torch.from_numpy(np.array(spheres, SPHERE).view(np.uint8)).to(device)
    camera = np.array(((0, 0, -4), 1.2, width, height), CAMERA)
    image = torch.empty(height, width, device=device)
    draw[(cupyops.ceil_div(width, 16), cupyops.ceil_div(height, 8)), (16, 8)](scene, len(spheres), camera, image)
    return image


def main() -> None:
    """Three spheres, of which one hides a part of another."""
    gpu = torch.cuda.is_available()
    with nullcontext() if gpu else cupyops.simulate():
        scene = [((-0.7, 0.2, 0.0), 1.0), ((0.9, -0.3, -1.0), 0.6), ((0.8, 0.9, 0.5), 0.5)]
        for row in render(scene, 56, 20, "cuda" if gpu else "cpu").tolist():
            print("".join(" .:-=+*#%@"[min(9, int(9.99 * value))] for value in row).rstrip())


if __name__ == "__main__":
    main()
