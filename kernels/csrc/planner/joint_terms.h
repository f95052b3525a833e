// What the joint planner's implementations share: prices, recipes, and the constants of its search.
#pragma once

#include "problem.h"

namespace topoep::joint {

constexpr int kRelieved = 768;  // starts that are relieved, times ranks squared

constexpr int kLevelDoubt = 10;  // per cent that the promise of levelled ranks is taken above itself
constexpr int kNearFirst = 10;   // a rank of the same domain is levelled first where it misses mean / 10

struct JointCosts {
  i64 assignment, token_far, token_near, copy_far, copy_near, plan;  // picoseconds
  i64 balance_weight;  // per cent of the compute term that a score adds
};

// One row of the candidate table: the targets that a candidate is built for.
struct Recipe {
  i32 copies;      // far copies that may leave one rank, times (M-1)/3
  i32 share;       // eighths of a domain's slots for brought experts
  i32 whole;       // 1: place brought experts whole, 0: cut them to fit
  i32 select_far;  // per cent of the mean load: far port at which bringing stops
  i32 fill_far;    // per cent of the mean load: outside part that a rank's mains keep, 0 = all
};

enum Kind { kFar, kLoad, kNear, kCopies, kKinds };

constexpr int kWidth = 6;    // experts that a turn looks at
constexpr int kGrain = 256;  // those with mean / kGrain assignments there and less are not
constexpr int kBand = 64;    // work within 1/kBand below a maximum counts as excess

// What the ranks of one domain contribute to the price.
struct DomainPeaks {
  i32 load, far, near;  // busiest ports, assignments
  i64 copies;           // busiest copy port, picoseconds
  i64 excess;           // see joint_relieve.h
};

struct Price {
  i64 total;  // the cost model of a plan with replicas, picoseconds
  i64 score;  // with the taste for balance
};

PLANNER_FN Price price_peaks(const JointCosts& c, const DomainPeaks& m) {
  const i64 compute = c.assignment * m.load;
  const i64 total = compute + c.token_far * m.far + c.token_near * m.near + m.copies + c.plan;
  return {total, total + compute / 100 * c.balance_weight};
}

}  // namespace topoep::joint
