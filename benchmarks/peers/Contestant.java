import static io.confluent.parallelconsumer.ParallelConsumerOptions.CommitMode.PERIODIC_CONSUMER_ASYNCHRONOUS;
import static io.confluent.parallelconsumer.ParallelConsumerOptions.CommitMode.PERIODIC_TRANSACTIONAL_PRODUCER;
import static io.confluent.parallelconsumer.ParallelConsumerOptions.ProcessingOrder.KEY;

import com.sun.management.OperatingSystemMXBean;
import io.confluent.parallelconsumer.ParallelConsumerOptions;
import io.confluent.parallelconsumer.ParallelStreamProcessor;
import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import org.apache.kafka.clients.consumer.CooperativeStickyAssignor;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Confluent's Parallel Consumer with its pool of threads, as its README shows it: reads a topic, and prints what it
 * measured as the contestants in Python do.
 */
public final class Contestant {
    private static final int LOOK_INTERVAL_MS = 20;
    private static final double STALL_SECONDS = 60;
    private static final double NEARLY_ALL = 0.99;

    /** One reading of the clocks. */
    private record Reading(double wall, double cpu, int records) {}

    private final Spec spec;
    private final Work work;
    private final ParallelStreamProcessor<byte[], byte[]> consumer;
    private final List<Reading> readings = new ArrayList<>();

    private Contestant(Spec spec) throws IOException {
        this.spec = spec;
        this.work = new Work(spec);
        var options = ParallelConsumerOptions.<byte[], byte[]>builder()
                .consumer(new KafkaConsumer<>(settings(spec), new ByteArrayDeserializer(), new ByteArrayDeserializer()))
                .ordering(KEY)
                .commitMode(PERIODIC_CONSUMER_ASYNCHRONOUS)
                .commitInterval(Duration.ofSeconds(1))
                .maxConcurrency(spec.number("concurrency"));
        if (publishes()) {
            Map<String, Object> producer =
                    Map.of("bootstrap.servers", spec.text("bootstrap"), "transactional.id", spec.text("group"));
            options.commitMode(PERIODIC_TRANSACTIONAL_PRODUCER)
                    .commitInterval(Duration.ofMillis(100))
                    .producer(new KafkaProducer<>(producer, new ByteArraySerializer(), new ByteArraySerializer()));
        }
        consumer = ParallelStreamProcessor.createEosStreamProcessor(options.build());
    }

    private boolean publishes() {
        return spec.text("contestant").endsWith("transactions");
    }

    /** Returns the settings that aioshard uses for its own client; all others keep their defaults. */
    private static Map<String, Object> settings(Spec spec) {
        Map<String, Object> settings = new HashMap<>();
        settings.put("bootstrap.servers", spec.text("bootstrap"));
        settings.put("group.id", spec.text("group"));
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", false);
        settings.put("isolation.level", "read_committed");
        settings.put("fetch.max.wait.ms", 100);
        settings.put("fetch.max.bytes", 16 * 1024 * 1024);
        settings.put("max.partition.fetch.bytes", 1024 * 1024);
        if (spec.text("contestant").endsWith("cooperative")) {
            settings.put("partition.assignment.strategy", CooperativeStickyAssignor.class.getName());
        }
        return settings;
    }

    public static void main(String[] arguments) {
        int code = 1;
        try {
            Spec spec = Spec.by(arguments);
            if (spec.text("work").equals("journal")) {
                new Contestant(spec).runUntilTerminated();
            } else {
                Contestant first = null;
                if (!spec.text("warm_up").isEmpty()) {
                    first = new Contestant(spec.warmingUp());
                    first.runToTheEnd();
                }
                Contestant measured = new Contestant(spec);
                measured.runToTheEnd();
                measured.printResult(first == null ? measured : first);
            }
            code = 0;
        } catch (Exception failure) {
            failure.printStackTrace();
        }
        System.out.flush();
        System.err.flush();
        Runtime.getRuntime().halt(code);
    }

    private void start() {
        consumer.subscribe(List.of(spec.text("topic")));
        if (publishes()) {
            consumer.pollAndProduce(context -> {
                var record = context.getSingleConsumerRecord();
                work.handle(record);
                return new ProducerRecord<>(spec.text("output"), record.key(), record.value());
            });
        } else {
            consumer.poll(context -> work.handle(context.getSingleConsumerRecord()));
        }
    }

    private void runToTheEnd() throws Exception {
        start();
        Reading progress = look();
        for (Reading now = progress; now.records < spec.number("records"); now = look()) {
            if (now.records > progress.records) {
                progress = now;
            } else if (now.wall - progress.wall > STALL_SECONDS) {
                throw new IllegalStateException(String.format(
                        "%s stopped at %d of %d records for %.0f s",
                        spec.text("contestant"), now.records, spec.number("records"), STALL_SECONDS));
            }
            check();
            Thread.sleep(LOOK_INTERVAL_MS);
        }
        consumer.closeDrainFirst();
    }

    private void check() {
        if (consumer.isClosedOrFailed()) {
            throw new IllegalStateException("Parallel Consumer has ended by itself");
        }
    }

    /** Runs until SIGTERM starts the shutdown hook, which processes the queued records before it closes. */
    private void runUntilTerminated() throws Exception {
        Thread ending = new Thread(() -> {
            consumer.closeDrainFirst();
            look();
            try {
                printResult(this);
            } catch (IOException failure) {
                failure.printStackTrace();
                Runtime.getRuntime().halt(1);
            }
            System.out.flush();
            Runtime.getRuntime().halt(0);
        });
        look();
        start();
        Runtime.getRuntime().addShutdownHook(ending);
        while (true) {
            Thread.sleep(1_000);
            if (!ending.isAlive()) {
                check();
            }
        }
    }

    private Reading look() {
        var system = (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        Reading reading =
                new Reading(System.nanoTime() / 1e9, system.getProcessCpuTime() / 1e9, work.done.get());
        readings.add(reading);
        return reading;
    }

    private void printResult(Contestant first) throws IOException {
        Reading last = readings.get(readings.size() - 1);
        int records = spec.number("records");
        int warm = spec.text("warm_up").isEmpty() ? Math.max(records / 10, 1) : 1;
        Reading from = firstWith(warm);
        double started = work.firstStarted.get() / 1e9;
        boolean timed = work.lastEnded.get() > work.firstStarted.get();
        Map<String, Object> result = new HashMap<>();
        result.put("records", last.records);
        result.put("cpu_seconds", last.cpu - from.cpu);
        result.put("cpu_records", last.records - from.records);
        result.put("wall_seconds", timed ? work.lastEnded.get() / 1e9 - started : last.wall - from.wall);
        result.put("wall_records", timed ? last.records : last.records - from.records);
        result.put("repeated", work.repeated());
        result.put("missing", timed ? Math.max(records - work.distinct(), 0) : 0);
        result.put("rss", status("VmRSS:"));
        result.put("peak_rss", status("VmHWM:"));
        result.put("disordered", work.disordered.get());
        result.put("peak_concurrency", work.peak.get());
        result.put("longest_pause", work.longestPause.get() / 1e9);
        result.put("nearly_seconds", timed ? firstWith((int) Math.ceil(records * NEARLY_ALL)).wall - started : 0.0);
        result.put(
                "start_seconds",
                timed ? first.work.firstStarted.get() / 1e9 - spec.seconds("spawned_at") : 0.0);
        List<String> members = new ArrayList<>();
        result.forEach((name, value) -> members.add(
                value instanceof Double number
                        ? String.format(Locale.ROOT, "\"%s\": %.9f", name, number)
                        : String.format(Locale.ROOT, "\"%s\": %s", name, value)));
        System.out.println("{" + String.join(", ", members) + "}");
    }

    private Reading firstWith(int records) {
        return readings.stream().filter(reading -> reading.records >= records).findFirst().orElse(readings.get(0));
    }

    /** Returns bytes. */
    private static long status(String name) throws IOException {
        for (String line : Files.readAllLines(Path.of("/proc/self/status"))) {
            if (line.startsWith(name)) {
                return Long.parseLong(line.replaceAll("\\D+", "")) * 1024;
            }
        }
        return 0;
    }
}
