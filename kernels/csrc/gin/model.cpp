// The job list and the signal counts of jobs.h on the CPU, for tests: no network, no GPU.
#include "jobs.h"

#define API extern "C" __attribute__((visibility("default")))

// puts [jobs][6]: from, to, part, source, target, context; from = -1 where the slot is empty.
// expected [contexts][2R]: adds what each source rank puts to `rank` under this plan.
API void topoep_gin_model(const std::int32_t* expert_G, const std::int32_t* place, long long rank,
                          long long R, long long e, long long S, long long bytes,
                          long long gradients, long long contexts, long long* puts,
                          long long* expected) {
  const gin::Plan p{expert_G, place, int(rank), int(R), int(e), int(S), bytes, int(gradients)};
  for (int job = 0; job < gin::jobs(p); ++job, puts += 6) {
    gin::Message put{};
    const bool full = gin::put_of(p, job, put);
    puts[0] = full ? put.from : -1;
    puts[1] = put.to;
    puts[2] = job % gin::kParts;
    puts[3] = put.source;
    puts[4] = put.target;
    puts[5] = gin::context_of(job, int(contexts));
  }
  for (int context = 0; context < int(contexts); ++context) {
    for (int r = 0; r < int(R); ++r) {
      expected[context * 2 * R + gin::signal_of(p, r)] +=
          gin::arriving(p, r, context, int(contexts));
    }
  }
}
