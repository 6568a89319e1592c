// Memory of the simulated devices: the CPU's, counted by device, in the order in which the host allocates and frees.
#pragma once
#include "streams.h"

#include <ATen/core/Tensor.h>

namespace sim {

// A tensor of a device from one of the CPU, whose memory it takes over.
at::Tensor adopt(const at::Tensor& cpu, int device);
// A tensor of the CPU with the memory of a device's tensor.
at::Tensor on_cpu(const at::Tensor& tensor);
// Given a tensor of the CPU that has the memory of another one's `on_cpu`: the device's tensor of the same elements.
at::Tensor view(const at::Tensor& cpu, const at::Tensor& base);

// Gives a tensor another one's shape and memory.
void become(const at::Tensor& tensor, const at::Tensor& other);

// Adds the memory that a device's tensor has its elements in, if it has any.
void note(const at::Tensor& tensor, std::vector<Piece>& pieces);
// Whoever has work with the block on that stream holds it until that is done, though it is freed.
void keep(const c10::DataPtr& data, c10::Stream stream);

// Whether memory of the host is pinned, and who gives such.
bool pinned(const void* data);
c10::Allocator* pinned_allocator();

// The allocation of this number, counted from the next one, fails, on whichever device; 0: none does.
void fail_at(uint64_t number);
// How many allocations there were, but for those of no bytes.
uint64_t asked();

size_t allocated(int device);
// What a cache would have that never gives anything back.
size_t cached(int device);
size_t most_allocated(int device);
void forget_most_allocated(int device);

}  // namespace sim
