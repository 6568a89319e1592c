// What Python calls, by ctypes.
#include "memory.h"
#include "streams.h"

#include <sstream>

namespace {

void print(std::ostringstream& out, const std::vector<sim::Piece>& them) {
  out << ",[";
  for (size_t k = 0; k < them.size(); k++)
    out << (k ? ",[" : "[") << them[k].block << ',' << them[k].first << ',' << them[k].last << ']';
  out << ']';
}

}  // namespace

extern "C" {

// The log as JSON: a list of launches, each one a list of kind, device, stream, priority, event, name, multiplications,
// bytes, and what is read and written (block, first byte, one past the last). Good until the next call.
const char* sim_launches() {
  static std::string text;
  std::ostringstream out;
  const char* before = "[";
  for (auto& it : sim::launches()) {
    out << before << "[\"" << static_cast<char>(it.kind) << "\"," << static_cast<int>(it.stream.device_index()) << ','
        << it.stream.id() << ',' << sim::priority(it.stream) << ',' << it.event << ",\"" << it.name << "\","
        << it.multiplications << ',' << it.bytes;
    print(out, it.reads);
    print(out, it.writes);
    out << ']';
    before = ",\n";
  }
  out << (*before == '[' ? "[]" : "]");
  text = out.str();
  return text.c_str();
}

// How many launches there are in the log.
size_t sim_launched() { return sim::launched(); }

// Forgets launches, and how much was allocated at most.
void sim_forget() {
  sim::forget_launches();
  for (int device = 0; device < sim::device_count(); device++) sim::forget_most_allocated(device);
}

void sim_fail_at(uint64_t number) { sim::fail_at(number); }
uint64_t sim_asked() { return sim::asked(); }
void sim_reset_peaks(int device) { sim::forget_most_allocated(device); }
size_t sim_cached(int device) { return sim::cached(device); }
size_t sim_allocated(int device) { return sim::allocated(device); }
size_t sim_most_allocated(int device) { return sim::most_allocated(device); }
}
