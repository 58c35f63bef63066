// Placement of units in gradient buffers, and the launch of full ones.
#include <algorithm>

#include "zero/error.h"

#include "engine/micro_batches.h"

namespace zero {

void MicroBatches::place(Micro& m, UnitId unit) {
  UnitGradient& g = m.units[index(unit)];
  if (g.progress != Progress::kNone) {
    return;
  }
  const std::uint64_t bytes = context_.plan.gradient_bytes(unit);
  g.bucket = room(m, unit, bytes);
  Bucket& b = buckets_[g.bucket];
  g.data = b.memory + b.used;
  g.progress = Progress::kPlaced;
  b.used += bytes;
  b.micro = m.slot;
  b.units.push_back(unit);
}

std::size_t MicroBatches::room(Micro& m, UnitId unit, std::uint64_t bytes) {
  if (until_ready_[index(unit)] != kNoBucket) {
    return until_ready_[index(unit)] + m.slot;
  }
  if (m.bucket != kNoBucket && buckets_[m.bucket].used + bytes <= buckets_[m.bucket].capacity) {
    return m.bucket;
  }
  if (m.bucket != kNoBucket) {
    close(m.bucket);
    m.bucket = kNoBucket;
    launch_closed();
  }
  m.bucket = free_bucket(unit);
  return m.bucket;
}

// The buffer whose reduction was enqueued first; its next writers wait for that on their stream.
std::size_t MicroBatches::free_bucket(UnitId unit) {
  const auto free = [&] {
    std::size_t best = kNoBucket;
    for (std::size_t b = 0; b < shared_buckets_; ++b) {
      if (buckets_[b].units.empty() &&
          (best == kNoBucket || buckets_[b].launched < buckets_[best].launched)) {
        best = b;
      }
    }
    return best;
  };
  std::size_t found = free();
  for (std::size_t b = 0; found == kNoBucket && b < shared_buckets_; ++b) {
    if (!buckets_[b].closed && all_ready(buckets_[b])) {  // another micro-batch's, not yet full
      micros_[buckets_[b].micro].bucket = kNoBucket;
      close(b);
      launch_closed();
      found = free();
    }
  }
  if (found != kNoBucket) {
    return found;
  }
  for (std::size_t b = 0; b < shared_buckets_; ++b) {
    for (const UnitId holder : buckets_[b].units) {
      if (micros_[buckets_[b].micro].units[index(holder)].progress != Progress::kReady) {
        throw UsageError(context_.who() + "unit '" + context_.name(unit) +
                         "' needs a gradient buffer, but all " + std::to_string(shared_buckets_) +
                         " are held; one by unit '" + context_.name(holder) +
                         "', which is not ready: call ready() or raise Options::buckets");
      }
    }
  }
  throw UsageError(context_.who() + "unit '" + context_.name(unit) +
                   "' needs a gradient buffer, but all wait for an earlier micro-batch: make its "
                   "units ready first or raise Options::buckets");
}

bool MicroBatches::all_ready(const Bucket& b) const {
  return std::all_of(b.units.begin(), b.units.end(), [&](UnitId u) {
    return micros_[b.micro].units[index(u)].progress == Progress::kReady;
  });
}

void MicroBatches::close(std::size_t bucket) {
  buckets_[bucket].closed = true;
  closed_.push_back(bucket);
}

// A closed bucket goes when all its units are ready and it is each unit's turn: sums are made in
// the order of ready(), whatever bucket fills first.
void MicroBatches::launch_closed() {
  const auto may_go = [&](std::size_t i) {
    const Bucket& b = buckets_[i];
    return all_ready(b) && std::all_of(b.units.begin(), b.units.end(), [&](UnitId u) {
             return micros_[b.micro].units[index(u)].turn == reducer_.summed(u);
           });
  };
  for (auto next = std::find_if(closed_.begin(), closed_.end(), may_go); next != closed_.end();
       next = std::find_if(closed_.begin(), closed_.end(), may_go)) {
    const std::size_t bucket = *next;
    closed_.erase(next);
    launch(buckets_[bucket]);
  }
  if (!closed_.empty() && open_count() == 0) {
    throw_crosswise(buckets_[closed_.front()]);
  }
}

// Nothing is missing, and yet a bucket waits: for one that waits for it.
void MicroBatches::throw_crosswise(const Bucket& b) const {
  for (const UnitId u : b.units) {
    if (micros_[b.micro].units[index(u)].turn != reducer_.summed(u)) {
      throw UsageError(context_.who() + "unit '" + context_.name(u) +
                       "' became ready in open micro-batches in another order than the units of "
                       "its bucket, so that two buckets wait for each other: make units ready in "
                       "one order, or set Options::bucket_bytes to 1");
    }
  }
}

void MicroBatches::launch(Bucket& b) {
  Micro& m = micros_[b.micro];
  contributions_.clear();
  after_.clear();
  for (const UnitId unit : b.units) {
    const UnitGradient& g = m.units[index(unit)];
    g.writers.append_to(after_);
    const bool complete =
        last_begun_ && reducer_.summed(unit) + 1 == static_cast<std::uint32_t>(begun_);
    contributions_.push_back({unit, g.data, complete});
  }
  b.free = reducer_.add(contributions_, after_);
  b.launched = ++launches_;
  b.units.clear();
  b.used = 0;
  b.closed = false;
  if (m.bucket != kNoBucket && &buckets_[m.bucket] == &b) {
    m.bucket = kNoBucket;
  }
}

void MicroBatches::abandon() {
  after_.clear();
  for (const Micro& m : micros_) {
    for (const UnitGradient& g : m.units) {
      if (g.progress != Progress::kNone) {
        g.writers.append_to(after_);
      }
    }
  }
  for (const Event& e : after_) {
    context_.device.wait(context_.stream, e);
  }
  const Event drained = context_.device.record(context_.stream);
  for (Bucket& b : buckets_) {
    if (!b.units.empty()) {
      b.free = drained;
      b.units.clear();
      b.used = 0;
      b.closed = false;
    }
  }
  reset();
}

void MicroBatches::reset() {
  for (Micro& m : micros_) {
    release_micro(m);
  }
  closed_.clear();
  std::fill(used_.begin(), used_.end(), std::uint8_t{0});
  std::fill(readied_.begin(), readied_.end(), 0U);
  begun_ = 0;
  last_begun_ = false;
  reducer_.reset();
}

}  // namespace zero
