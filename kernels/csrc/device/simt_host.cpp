// C ABI of the SIMT machine: schedules and counters for tests, and why a launch failed.
#include "simt.h"

#define API extern "C" __attribute__((visibility("default")))

// order: 0 forward, 1 reverse, 2 random.
API void topoep_simt_schedule(int order, unsigned long long seed) {
  simt::set_schedule(simt::Order(order), seed);
}

// Of this thread's last launch: barriers, collectives, the longest chain of both, bulk copies.
API void topoep_simt_counters(long long* into) {
  const simt::Counters& c = simt::counters();
  into[0] = c.barriers;
  into[1] = c.collectives;
  into[2] = c.longest;
  into[3] = c.bulk_copies;
}

// The longest chain of each launch since the schedule was set, of the first 32; how many.
API int topoep_simt_chains(long long* into) {
  const auto& chains = simt::chains();
  for (std::size_t i = 0; i < chains.size(); ++i) into[i] = chains[i];
  return int(chains.size());
}

API const char* topoep_device_error(int) { return simt::error(); }
