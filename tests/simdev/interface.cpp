// What Python calls, by ctypes.
#include "memory.h"
#include "streams.h"

#include <sstream>

namespace {

void numbers(std::ostringstream& out, const std::vector<uint64_t>& them) {
  out << ' ';
  for (size_t k = 0; k < them.size(); k++) out << (k ? "," : "") << them[k];
  if (them.empty()) out << '-';
}

}  // namespace

extern "C" {

// The log as text: kind, device, stream, priority, event, name, multiplications, bytes, and blocks that are read and
// written, of a launch a line. Good until the next call.
const char* sim_launches() {
  static std::string text;
  std::ostringstream out;
  for (auto& it : sim::launches()) {
    out << static_cast<char>(it.kind) << ' ' << static_cast<int>(it.stream.device_index()) << ' ' << it.stream.id()
        << ' ' << sim::priority(it.stream) << ' ' << it.event << ' ' << it.name << ' ' << it.multiplications << ' '
        << it.bytes;
    numbers(out, it.reads);
    numbers(out, it.writes);
    out << '\n';
  }
  text = out.str();
  return text.c_str();
}

// Forgets launches, and how much was allocated at most.
void sim_forget() {
  sim::forget_launches();
  sim::forget_most_allocated();
}

size_t sim_allocated(int device) { return sim::allocated(device); }
size_t sim_most_allocated(int device) { return sim::most_allocated(device); }
}
